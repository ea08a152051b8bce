// Orders what the search finds: a job's page first, then other guides, then reference. Sphinx reads it in place of
// its own Scorer, whose numbers stay; JOBS, the pages of docs/guides.md's jobs, is written before it.
const WORDS = (new URLSearchParams(window.location.search).get("q") || "").toLowerCase().match(/[\p{L}\d]+/gu) || [];
var Scorer = {
  score: ([docname, title, anchor, descr, score]) => {
    const page = docname.replace(/^docs\//, "");
    const first = JOBS.includes(page) ? 8 : page.includes("/") ? 0 : 4;
    const heading = title.toLowerCase().match(/[\p{L}\d]+/gu) || [];
    const named = WORDS.filter((word) => heading.some((other) => other.startsWith(word.replace(/s$/, ""))));
    return score + first + 5 * named.length + named.length / (heading.length + 1);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
