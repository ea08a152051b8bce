"""The documentation site, built strictly, and walked by a browser from its folder: links, console, network, width."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote_plus, unquote, urlsplit

import pytest
from docs.site.__main__ import list_versions

from grappe import engines
from grappe.cli.commands import app
from grappe.plan import Plan
from tests.chromium import Browser, found
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
NARROW, LAPTOP = 400, 1366  # pixels


def built(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "docs.site", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site's folder."""
    folder = tmp_path_factory.mktemp("built") / "site"
    done = built(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("name", ["site", "site-sources"])
def test_a_folder_of_somebody_else_is_kept(name: str, tmp_path: Path) -> None:
    theirs = tmp_path / name / "thesis.tex"
    theirs.parent.mkdir()
    theirs.touch()
    done = built(tmp_path / "site")
    assert done.returncode == 2
    assert f"{theirs.parent} holds something else" in done.stderr
    assert theirs.exists()


@pytest.fixture(scope="module")
def browser():
    program = found()
    if program is None:
        pytest.skip("there is no Chromium here")
    one = Browser(program)
    yield one
    one.close()


class Page(HTMLParser):
    """Lists what a page links to and loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if identifier := given.get("id"):
            self.anchors.add(identifier)
        if tag == "a" and (link := given.get("href")):
            self.links.add(link)
        if tag in ("img", "script", "source") and (link := given.get("src")):
            self.loaded.add(link)
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload") and (link := given.get("href")):
            self.loaded.add(link)


def test_every_link_and_anchor_leads_somewhere(site: Path) -> None:
    pages = {file: Page(file.read_text()) for file in site.rglob("*.html")}
    assert len(pages) > 200
    wrong = []
    for file, page in pages.items():
        for link in page.links | page.loaded:
            path, _, anchor = unquote(link.partition("?")[0]).partition("#")
            if ":" in path:
                assert link not in page.loaded, f"{file.name} loads {link}"
                continue
            there = (file.parent / path).resolve() if path else file
            if not there.is_file() or (anchor and there in pages and anchor not in pages[there].anchors):
                wrong.append(f"{file.relative_to(site)}: {link}")
    assert not wrong, wrong


def test_each_language_leads_to_the_other(site: Path) -> None:
    for file in (ROOT / "docs" / "fr").glob("*.md"):
        if file.stem != "README":
            assert f"docs/{file.stem}.html" in (site / "fr" / f"{file.stem}.html").read_text()
            assert f"fr/{file.stem}.html" in (site / "docs" / f"{file.stem}.html").read_text()
    for file in (ROOT / "labs").glob("*.ipynb"):
        page = f"labs/{file.name}.html"
        assert f"../../{page}" in (site / "fr" / page).read_text()
        assert f"../fr/{page}" in (site / page).read_text()
    assert 'lang="fr"' in (site / "fr" / "index.html").read_text()


def test_the_first_page_has_five_entries(site: Path) -> None:
    for folder in (site, site / "fr"):
        entries = re.search(r'<nav class="entries">(.*?)</nav>', (folder / "index.html").read_text(), re.DOTALL)
        assert entries
        assert len(re.findall("<a ", entries[1])) == 5


def test_a_page_names_its_source_and_its_columns(site: Path) -> None:
    english, french = ((site / folder / "plans.html").read_text() for folder in ("docs", "fr"))
    assert "<code>docs/plans.md</code>" in english
    assert '<td data-label="engines">' in english
    assert "<code>docs/fr/plans.md</code>" in french
    assert "Beaucoup d'exécutions\N{NO-BREAK SPACE}:" in french


def test_agents_find_every_guide(site: Path) -> None:
    text = (site / "llms.txt").read_text()
    pages = re.findall(r"^- \[.+?\]\((\S+?)\)", text, re.MULTILINE)
    guides = {file.stem for file in (ROOT / "docs").glob("*.md")}
    assert {(site / page).stem for page in pages} == guides - {"api", "json"}
    assert all((site / page).is_file() for page in pages)


def test_the_search_leaves_decisions_and_sources_out(site: Path) -> None:
    text = (site / "searchindex.js").read_text()
    index = json.loads(text[text.index("(") + 1 : text.rindex(")")])
    found = [index[terms]["fsdp"] for terms in ("terms", "titleterms")]
    pages = [page for each in found for page in ([each] if isinstance(each, int) else each)]
    names = {index["docnames"][page] for page in pages}
    assert "docs/plans" in names
    assert not any(name.startswith(("docs/decisions/", "tests/", "src/")) for name in names)


def test_each_command_has_its_help(site: Path) -> None:
    for name in app:
        if not name.startswith("-"):
            assert f"Usage: grappe {name}" in (site / "commands" / f"{name}.html").read_text(), name
            french = (site / "fr" / "commands" / f"{name}.html").read_text()
            assert f"Utilisation : grappe {name}" in french
            assert f"commands/{name}.html" in french
    assert 'id="patience"' in (site / "commands" / "train.html").read_text(), "an option can be linked to"


NOTES = tomllib.loads((ROOT / "docs" / "site" / "plan_keys.toml").read_text())


def test_the_notes_are_of_the_keys_that_there_are() -> None:
    assert list(NOTES) == [field.name for field in dataclasses.fields(Plan)]


@pytest.mark.parametrize("key", NOTES)
def test_the_example_of_a_plan_key_is_a_plan_that_has_it(key: str, here: Path) -> None:
    (here / "ds_config.json").write_text("{}")
    plan = Plan.parse(NOTES[key]["example"])
    assert key in plan.changed_keys()
    engines.check(plan)


def test_each_plan_key_has_its_example_and_pitfall(site: Path) -> None:
    for key, note in NOTES.items():
        english, french = ((site / folder / "plan" / f"{key}.html").read_text() for folder in ("", "fr"))
        assert f"--plan {note['example']}" in english and f"--plan {note['example']}" in french
        assert "Take care:" in english and "Attention\N{NO-BREAK SPACE}:" in french
    assert "torch.distributed.fsdp.fully_shard" in (site / "fr" / "plan" / "shard.html").read_text()


def walked(browser: Browser, site: Path, files: list[Path]) -> list[str]:
    """Lists what is wrong with these pages in a narrow browser."""
    wrong = []
    for file in files:
        browser.open(file, NARROW, 800)
        name = file.relative_to(site)
        wrong += [f"{name}: {one}" for one in browser.complaints]
        wrong += [f"{name} asks for {one}" for one in browser.requests if not one.startswith(("file:", "data:"))]
        if (width := browser.evaluate("document.documentElement.scrollWidth")) > NARROW:
            wrong.append(f"{name} is {width} pixels wide")
    return wrong


def test_guides_in_a_narrow_browser(site: Path, browser: Browser) -> None:
    files = [*site.glob("fr/*.html"), *site.glob("docs/*.html"), site / "index.html", site / "errors.html"]
    files += [next(site.glob(f"{kind}/*.html")) for kind in ("api", "commands", "plan", "sites")]
    assert not walked(browser, site, sorted(files))
    browser.open(site / "index.html", LAPTOP)
    assert browser.evaluate("document.documentElement.scrollWidth") <= LAPTOP


@pytest.mark.soak
def test_every_page_in_a_narrow_browser(site: Path, browser: Browser) -> None:
    assert not walked(browser, site, sorted(site.rglob("*.html")))


@pytest.mark.parametrize(
    ("folder", "page", "section", "guide"),
    [
        ("", "from a wiki page", "every script", "on a cluster"),
        ("fr", "depuis une page", "chaque script", "sur une grappe"),
    ],
)
def test_a_script_of_a_page_is_three_clicks_away(
    site: Path, browser: Browser, folder: str, page: str, section: str, guide: str
) -> None:
    def address(text: str) -> str:
        links = "[...document.querySelectorAll('article a')]"
        return browser.evaluate(f"{links}.find(one => one.textContent.trim() == {json.dumps(text)})?.href ?? ''")

    browser.open(site / folder / "index.html", NARROW)
    file = Path(unquote(urlsplit(address(page)).path))
    assert file.name == "from-a-page.html"
    browser.open(file, NARROW)
    anchor = unquote(urlsplit(address(section)).fragment)
    rows = f"[...document.getElementById({json.dumps(anchor)}).querySelectorAll('tr')]"
    row = browser.evaluate(f"{rows}.find(one => one.textContent.includes('pytorch-ddp-test.sh'))?.textContent")
    assert "grappe submit" in row
    assert unquote(address(guide)).endswith("/slurm.html")


@pytest.mark.parametrize(("folder", "word", "page"), [("", "preemption", "slurm"), ("fr", "grappe", "plans")])
def test_the_search_needs_no_server(site: Path, browser: Browser, folder: str, word: str, page: str) -> None:
    browser.open(site / folder / "search.html")
    browser.evaluate(f"Search.performSearch('{word}')")
    found = "document.querySelector('#search-results ul.search')?.innerHTML ?? ''"
    look = f"const look = () => ({found}).includes('{page}') ? done() : setTimeout(look, 50); look()"
    browser.evaluate(f"new Promise(done => {{ {look} }})")
    assert not browser.complaints
    assert all(one.startswith(("file:", "data:")) for one in browser.requests)


QUERIES = {
    "launch": ("multiple GPUs", "ddp"),
    "environment": ("uv", "virtualenv"),
    "notebook": ("jupyter",),
    "several-nodes": ("nccl",),
    "resume": ("resume", "save checkpoint", "preemption", "early stopping"),
    "tune": ("slurm array", "hyperparameter search"),
    "another-cluster": ("transfer to another cluster",),
    "foresee": ("out of memory", "how much memory"),
    "which-gpu": ("which gpu",),
    "feed-gpu": ("dataloader workers", "small files"),
    "scaling": ("proof of scaling",),
    "energy": ("energy",),
    "verify": ("seed",),
    "track": ("wandb",),
    "fine-tune": ("hugging face", "lora"),
    "agent": ("agent",),
    "plans": ("gradient accumulation", "mixed precision"),
    "task": ("custom metric",),
    "learning-rate": ("learning rate scheduler",),
    "export": ("export onnx",),
}
"""Queries of a newcomer, by the guide that should be the first result."""


def test_the_search_finds_the_page_of_the_job_first(site: Path, browser: Browser) -> None:
    pages = {query: page for page, queries in QUERIES.items() for query in queries}
    assert len(pages) == 30
    results = "document.querySelector('#search-results ul.search a')?.getAttribute('href')"
    over = "(document.querySelector('#search-results .search-summary')?.textContent.trim() ? '' : null)"
    look = (
        f"const look = () => {{ const at = {results} ?? {over}; at == null ? setTimeout(look, 20) : done(at) }}; look()"
    )
    first = {}
    for query in pages:
        browser.open(site / "search.html", query=f"?q={quote_plus(query)}")
        first[query] = browser.evaluate(f"new Promise(done => {{ {look} }})")
    wrong = {query: first[query] for query, page in pages.items() if Path(urlsplit(first[query]).path).stem != page}
    assert not wrong, "no exception is needed: see docs/site/scorer.js, or mend the page's title or heading"


def test_the_dark_mode_is_dark(site: Path, browser: Browser) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    browser.prefer("light")
    browser.open(site / "index.html")
    light = browser.evaluate(colour)
    browser.prefer("dark")
    dark = browser.evaluate(colour)
    browser.prefer("light")
    assert sum(rgb(dark)) < 150 < 600 < sum(rgb(light))


def test_a_version_offers_those_beside_it(site: Path, browser: Browser, tmp_path: Path) -> None:
    choice = "document.querySelector('.sidebar-drawer select')"
    browser.open(site / "index.html")
    assert browser.evaluate(f"{choice}.hidden")
    for name in ("0.9", "0.10"):
        shutil.copytree(site, tmp_path / name)
    list_versions(tmp_path)
    for name, page in (("0.9", "docs/plans.html"), ("0.10", "fr/plans.html")):
        browser.open(tmp_path / name / page)
        offered = f"[{choice}.hidden, {choice}.selectedOptions[0].text, [...{choice}.options].map(one => one.value)]"
        addresses = [(tmp_path / each / "index.html").as_uri() for each in ("0.10", "0.9")]
        assert browser.evaluate(offered) == [False, name, addresses]
    assert not browser.complaints


def rgb(colour: str) -> list[int]:
    return [int(one) for one in colour.partition("(")[2].rstrip(")").split(",")[:3]]
