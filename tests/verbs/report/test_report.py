"""The report in a real browser: every plot drawn, nothing asked of anybody, no complaint, whatever the runs' state."""

import dataclasses
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import tests.parity.tasks
from grappe.checkpoint.commit import write_json
from grappe.contrib.tune.journal import importance
from grappe.contrib.tune.space import Trial
from grappe.contrib.tune.study import make_study
from grappe.errors import RunError, UsageError
from grappe.training.run import CODE, SCORES, Run
from grappe.verbs.load import load
from grappe.verbs.report.predictions import histogram
from grappe.verbs.report.report import compared, gather, html, report, thinned
from tests import chromium
from tests.contrib.tune.test_study import SEARCH, filled
from tests.parity.tasks import Images
from tests.training.test_training import train

ROWS = "document.querySelectorAll('#results tr')"
HOSTILE = "</script><script>console.error('run')</script><img src=x onerror=console.error(1)>@@CODE@@"


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Browser]:
    program = chromium.found()
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    made = chromium.Browser(program)
    yield made
    made.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run, in two starts."""
    folder = tmp_path_factory.mktemp("report") / "images"
    task = Images(epochs=3, rule="adam", clip=0.5)
    train(folder, task, steps=4, name="small images", tag=("base",))
    train(folder, task)
    return folder


def another(run: Path, folder: str, /, **changes: object) -> Path:
    """A copy of a run with some of its description changed."""
    made = run.parent / folder
    shutil.copytree(run, made, dirs_exist_ok=True)
    Run(made).describe(**changes)
    return made


def texts(browser: chromium.Browser, selector: str) -> list[str]:
    return browser.evaluate(f"[...document.querySelectorAll('{selector}')].map(one => one.textContent)")


def captions(browser: chromium.Browser) -> list[str]:
    return browser.evaluate("[...document.querySelectorAll('figcaption')].map(one => one.firstChild.textContent)")


def choose(browser: chromium.Browser, element: str, value: str) -> None:
    browser.evaluate(f"chosen = {element}, chosen.value = '{value}', chosen.dispatchEvent(new Event('change'))")


def read(browser: chromium.Browser, key: str, at: int = 0) -> str:
    """Text of a plot's point, as a key chooses it."""
    browser.evaluate(f"document.querySelectorAll('figure svg')[{at}].focus()")
    browser.press(key)
    return browser.evaluate(f"document.querySelectorAll('figure output')[{at}].textContent")


def shown(browser: chromium.Browser, file: Path) -> int:
    """Opens a report and checks what must hold of every one; how many plots it has."""
    browser.open(file)
    plots, drawn, empty = browser.evaluate(
        "[document.querySelectorAll('figure').length, document.querySelectorAll('figure[data-drawn=yes]').length,"
        " [...document.querySelectorAll('svg')].filter(one => !one.querySelector('path, rect, line')).length]"
    )
    assert browser.complaints == []
    assert browser.requests == [file.resolve().as_uri()]
    assert plots == drawn > 0
    assert empty == 0
    assert "NaN" not in browser.evaluate("document.getElementById('plots').innerHTML")
    return plots


def test_one_run(browser: chromium.Browser, run: Path) -> None:
    file = report([run])
    assert file == run / "report.html"
    assert shown(browser, file) >= 9
    titles = captions(browser)
    for title in ("training loss", "validation loss", "learning rate", "gradient norm", "throughput"):
        assert title in titles
    assert "where a step's time goes" in titles
    cells = browser.evaluate(f"[...{ROWS}].map(row => [...row.cells].map(cell => cell.textContent))")
    assert cells[0][:2] == ["run", "plan"]
    assert cells[1][0] == "small images"
    assert "not measurable here" in browser.evaluate("document.body.innerText") or "J a sample" in titles
    # A run that was started twice says so.
    row = "[...document.querySelectorAll('#configuration tr')].find(one => one.cells[0].textContent === 'restarts')"
    assert browser.evaluate(f"{row}.cells[1].textContent") == "1"


def test_sizes_are_drawn_over_steps(browser: chromium.Browser, run: Path, tmp_path: Path) -> None:
    starts = [{"at": 1.0, "step": 0, "processes": 2, "nodes": 2}, {"at": 2.0, "step": 3, "processes": 4, "nodes": 4}]
    file = report([another(run, "resized", sizes=starts)], tmp_path / "resized.html")
    shown(browser, file)
    assert "processes" in captions(browser)
    drawn = browser.evaluate("DATA.runs[0].sizes")
    assert drawn[:3] == [[0, 2], [3, 2], [3, 4]] and drawn[3][1] == 4 and len(drawn) == 4


def test_twenty_runs_and_their_differences(browser: chromium.Browser, run: Path, tmp_path: Path) -> None:
    runs = [another(run, f"copy-{number}", name="", plan=f"replicate={number + 1}") for number in range(20)]
    file = report(runs, tmp_path / "twenty.html")
    shown(browser, file)
    assert browser.evaluate("document.querySelectorAll('#legend input').length") == 20
    assert browser.evaluate("document.querySelector('#legend label').textContent") == "copy-0 (replicate=1)"
    assert browser.evaluate("document.title").startswith("copy-0, copy-1, copy-2 and 17 more")
    curves = "document.querySelector('figure svg').querySelectorAll('path').length"
    assert browser.evaluate(curves) == 20
    browser.evaluate("document.querySelector('#legend input').click()")
    assert browser.evaluate(curves) == 19
    assert texts(browser, "tr.differs > :first-child") == ["folder", "plan"]


def test_seeds_have_a_mean_and_the_table_is_sorted_by_a_click(browser, run: Path, tmp_path: Path) -> None:
    fields = Run(run).read_description()["fields"]
    runs = [
        another(run, f"seed-{rate}-{seed}", name="", fields={**fields, "lr": rate, "seed": seed})
        for rate, seed in (("0.5", "0"), ("0.5", "1"), ("0.2", "0"))
    ]
    for place, scale in zip(runs, (1.0, 3.0, 7.0), strict=True):
        line = {"kind": "evaluation", "step": 9, "samples": 29, "loss": scale, "rmse": scale}
        (place / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        Run(place).describe(lower_is_better=["rmse"])
        write_json(place / SCORES, {"test": {"metrics": {"rmse": scale + 1}, "checkpoint": "step-000009"}})
    results = compared([Run(place) for place in runs])
    assert (results["metric"], results["lower"], results["keys"]) == ("rmse", True, ["lr", "seed"])
    (group,) = results["groups"]
    assert group["rows"] == [0, 1]
    assert (group["mean"]["best"], group["mean"]["test"]) == (2.0, 3.0)
    assert group["deviation"]["best"] == pytest.approx(2**0.5)
    shown(browser, report(runs, tmp_path / "seeds.html"))
    first = f"[...{ROWS}].slice(1).map(row => row.cells[0].textContent)"
    seeds = ["seed-0.5-0", "seed-0.5-1", "seed-0.2-0"]
    assert browser.evaluate(first) == ["mean ± standard deviation of 2 seeds", *seeds]
    browser.evaluate("document.querySelector('th[data-key=lr] button').click()")
    assert browser.evaluate(first)[0] == "seed-0.2-0"
    assert browser.evaluate("document.querySelector('th[data-key=lr]').getAttribute('aria-sort')") == "ascending"
    browser.evaluate("document.querySelector('th[data-key=lr] button').click()")
    assert browser.evaluate(first)[-1] == "seed-0.2-0"
    mean = browser.evaluate(f"[...{ROWS}][1].textContent")
    assert "2.000 ± 1.4" in mean
    assert read(browser, "End") == "lr 0.5: lr=0.5, seed=0 1, lr=0.5, seed=1 3"
    choose(browser, "document.querySelectorAll('figure select')[1]", "test")
    assert read(browser, "End") == "test rmse 8: lr=0.2, seed=0 7"


def test_the_x_axis_is_chosen_for_all_plots_and_zoomed(browser: chromium.Browser, run: Path) -> None:
    shown(browser, report([run]))
    labels = "[...document.querySelectorAll('svg')].map(one => one.getAttribute('aria-label'))"
    at = browser.evaluate(labels).index("training loss: 1 curves; arrow keys read them")
    last_text = f"[...document.querySelectorAll('svg')[{at}].querySelectorAll('text')].at(-1).textContent"
    for axis, name in (("step", "step"), ("epoch", "epoch"), ("samples", "samples"), ("time", "time of steps (s)")):
        choose(browser, "document.getElementById('across')", axis)
        assert browser.evaluate(last_text) == name
        last = {"step": "9", "epoch": "3", "samples": "87"}.get(axis, "")
        assert read(browser, "End", at).startswith(f"{name} {last}: small images " if last else "")
    choose(browser, "document.getElementById('across')", "step")
    browser.evaluate("zoomTo([4, 6]), 0")
    browser.press("Home")
    assert read(browser, "Home", at).startswith("step 4: ")


def test_a_plot_is_saved_as_a_file(browser: chromium.Browser, run: Path) -> None:
    shown(browser, report([run]))
    browser.evaluate("saved = [], save = (name, type, text) => saved.push([name, text]), 0")
    browser.evaluate("[...document.querySelectorAll('figure .save')].slice(0, 2).forEach(one => one.click())")
    browser.evaluate("document.querySelector('section h2 .save').click()")
    (plot, svg), (table, figures), (_, results) = browser.evaluate("saved")
    assert (plot, table) == ("validation loss.svg", "validation loss.csv")
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "validation loss" in [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert figures.splitlines()[0] == '"curve","step","value"'
    assert figures.splitlines()[-1].startswith('"small images",9,')
    assert results.splitlines()[0].startswith('"run","plan","best","loss"')
    formula = browser.evaluate("csv(['a'], [['=1+1'], ['say \"x\"'], [2.5]])")
    assert formula == '"a"\n"\'=1+1"\n"say ""x"""\n2.5\n'


def test_predictions_of_classes(browser: chromium.Browser, run: Path, tmp_path: Path) -> None:
    entry = gather([run], predictions=True)["runs"][0]["predictions"]
    assert (entry["samples"], entry["checkpoint"], entry["split"]) == (29, "step-000009", "validation")
    model, task = load(run), Images(epochs=3, rule="adam", clip=0.5)
    inputs, targets = zip(*(task.data("validation", tmp_path)[index] for index in range(29)), strict=True)
    right = model(torch.stack(inputs)).argmax(1) == torch.tensor([int(target) for target in targets])
    assert entry["right"] == int(right.sum()) == sum(row[at] for at, row in enumerate(entry["matrix"]))
    assert sum(map(sum, entry["matrix"])) == 29
    assert sum(count for *_, count in entry["confusions"]) == 29 - entry["right"]
    assert all(one["target"] != one["predicted"] for one in entry["pictures"][: min(12, 29 - entry["right"])])
    file = report([run], tmp_path / "predicted.html", predictions=True)
    shown(browser, file)
    assert browser.evaluate("document.querySelectorAll('canvas').length") == len(entry["pictures"]) > 12
    assert (len(entry["losses"]["samples"]), sum(entry["losses"]["samples"])) == (30, 29)
    assert "losses of samples" in browser.evaluate("document.getElementById('plots').textContent")


def test_weights_code_and_notes(browser: chromium.Browser, run: Path, tmp_path: Path) -> None:
    """The lines that differ between two runs are text, whatever they say; weights are counted from the checkpoint."""
    kept = (run / CODE).read_text()
    assert kept == Path(tests.parity.tasks.__file__).read_text()
    other = another(run, "other code", note=HOSTILE)
    (other / CODE).write_text(kept.replace("29 samples in batches of 12", HOSTILE))
    gathered = gather([run, other], weights=True)
    [change] = gathered["code"]
    assert [line[0] for line in change["lines"][2:] if line[0] in "+-"] == ["-", "+"] and change["from"] == "images"
    counts, model = gathered["runs"][0]["weights"], load(run)
    assert set(counts) == set(dict(model.named_parameters()))
    assert sum(counts["3.weight"]["samples"]) == 5 * 16
    assert counts["3.weight"]["from"] == pytest.approx(float(model.get_parameter("3.weight").detach().min()))
    shown(browser, report([run, other], tmp_path / "code.html", weights=True))
    assert browser.evaluate("document.querySelectorAll('pre.diff .added').length") == 1
    assert browser.evaluate("document.querySelector('small.note').textContent.includes('</script>')")


def test_losses_that_are_no_numbers_are_in_no_bin() -> None:
    nan, inf = float("nan"), float("inf")
    assert sum(histogram(torch.tensor([0.0, 1.0, nan, inf]))["samples"]) == 2
    assert sum(histogram(torch.tensor([0.5, 0.5]))["samples"]) == 2
    assert histogram(torch.tensor([nan]))["samples"] == [0] * 30


def test_a_report_in_french(browser: chromium.Browser, run: Path, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRAPPE_LANG", "fr")
    shown(browser, report([run], tmp_path / "fr.html"))
    assert browser.evaluate("document.documentElement.lang") == "fr"
    text = browser.evaluate("document.body.innerText")
    for words in ("Résultats", "taux d'apprentissage", "perte", "débit"):
        assert words in text


def test_a_search_for_a_learning_rate(browser: chromium.Browser, tmp_path: Path) -> None:
    curve = {"seed": 0, "lr": [0.001, 0.01, 0.1], "loss": [2.0, 1.5, 1.7], "diverged": True}
    band = {"steepest": 0.01, "largest_stable": 0.04, "suggested": 0.02, "reaches_the_end": False}
    for name, found in (("a", {"band": band, "reason": ""}), ("b", {"band": None, "reason": "<b>noise</b>"})):
        known = {"kind": "lr-find", "task": name, "plan": "", "ramp": {"kind": "exponential"}, "curves": [curve]}
        (tmp_path / f"{name}.json").write_text(json.dumps({**known, **found}))
    shown(browser, report([tmp_path / "a.json", tmp_path / "b.json"], tmp_path / "report.html"))
    text = browser.evaluate("document.body.innerText")
    assert "Steepest 0.01, largest stable 0.04, suggested 0.02" in text
    assert "No suggestion: <b>noise</b>" in text


def test_a_study(browser: chromium.Browser, tmp_path: Path) -> None:
    space = {"lr": "0.001..1.0:log", "width": "1..64", "rule": "adam|<b>sgd</b>"}
    definition = {"task": "digits", "space": space, "metric": "accuracy", "maximize": True, "halving": 2, "rungs": 2}
    search = dataclasses.replace(SEARCH, **definition)
    study = make_study(tmp_path / "study", search)
    filled(study, Trial(number=0, fields={"lr": "0.1", "width": "9", "rule": "adam"}))
    nothing_yet = report([tmp_path / "study"])
    assert nothing_yet == tmp_path / "study" / "report.html"
    shown(browser, nothing_yet)
    rules, trials = space["rule"].split("|"), list[Trial]()
    for number in range(1, 20):
        fields = {"lr": f"{10 ** (-number / 7):.4g}", "width": str(3 * number), "rule": rules[number % 2]}
        value = 1 / (1 + abs(number - 9))
        state, rungs = ("complete", (0.1, value)) if number % 4 else ("paused", (value,))
        end = value if state == "complete" else None
        trials.append(Trial(number=number, fields=fields, state=state, value=end, rungs=rungs))
    filled(study, *trials, Trial(number=20, fields=fields, state="failed", reason="<i>nan</i>"))
    assert shown(browser, report([tmp_path / "study"])) == 3
    dots = "document.querySelectorAll('figure')[1].querySelectorAll('circle').length"
    assert browser.evaluate(dots) == 19, "the trials that have a score"
    across = "[...document.querySelectorAll('figure')[1].querySelectorAll('text')].at(-1).textContent"
    assert browser.evaluate(across) == "log10 of lr"
    assert texts(browser, "figure select option") == ["accuracy", "lr", "width"] * 2, "rule is no number"
    text = browser.evaluate("document.body.innerText")
    assert "digits: 15 complete, 4 paused, 1 failed, 1 open. Best: trial 9, accuracy 1." in text
    paths = "[...document.querySelectorAll('figure')][0].querySelectorAll('path').length"
    assert browser.evaluate(paths) == 21
    shares = importance(study.search, study.trials)
    assert max(shares, key=lambda name: shares[name]) in ("lr", "width")
    assert sum(shares.values()) == pytest.approx(1.0)


def test_a_run_still_going_and_one_that_crashed(browser: chromium.Browser, run: Path, tmp_path: Path) -> None:
    going = another(run, "going", status="running", costs=[], used={})
    (going / "done").unlink()
    for name in ("metrics.jsonl", "usage.jsonl"):
        with (going / name).open("a") as file:
            file.write('{"kind": "step", "step": 10, "lo')  # half a line
    crashed = another(run, "crashed", status="running", costs=[], used={})
    (crashed / "done").unlink()
    (crashed / "lease.json").write_text("{}")  # nobody holds it
    (crashed / "metrics.jsonl").write_text('not json\n{"kind": "step", "step": 1, "loss": null, "lr": 0.1}\n[1]\n')
    (crashed / "usage.jsonl").write_text('{"phases": 3}\n{"time": "now", "phases": {}}\n')
    fresh = another(run, "fresh", status="running", costs=[], used={})
    for name in ("done", "metrics.jsonl", "usage.jsonl"):
        (fresh / name).unlink()
    for place in (going, crashed):
        shown(browser, report([place]))
    shown(browser, report([run, going, crashed, fresh], tmp_path / "all.html"))
    rows = browser.evaluate(f"[...{ROWS}].map(row => row.cells[0].textContent)")
    assert "small images (going) running" in rows
    assert "small images (crashed) ended unexpectedly" in rows
    assert browser.evaluate("document.getElementById('summary').textContent").startswith("1 finished, ")
    browser.open(report([fresh]))
    assert browser.complaints == []
    assert "no step has been taken yet" in browser.evaluate("document.body.innerText")


def test_a_measurement(browser: chromium.Browser, run: Path, tmp_path: Path) -> None:
    shares = {"forward": 0.5, "backward": 0.3, "communication": 0.2}
    point = {
        "plan": "", "batch": 64, "processes": 1, "slices": 1, "origin": "asked", "samples_per_second": 100.0,
        "speed_up": 1.0, "efficiency": 1.0, "shares": shares, "memory": 10**8, "joules_per_sample": 0.5,
        "lost": {"data": -0.1, "communication": 0.3},
    }  # fmt: skip
    points = [point, {**point, "plan": "replicate=2", "processes": 2, "slices": 2, "samples_per_second": 150.0}]
    points.append({"plan": "device=cuda", "batch": 64, "processes": 1, "origin": "asked", "failure": HOSTILE})
    measured = tmp_path / "measured.json"
    part = {"part": "waiting for data", "word": HOSTILE, "saves": 0.6}
    parts = {"waiting for data": 0.6, "not explained": 0.1, "useful compute": 0.3}
    remedies = [part, {**part, "part": "small batch", "saves": 0.0}]
    why = {"plan": "", "batch": 64, "seconds": 0.1, "parts": parts, "remedies": remedies}
    told = {"kind": "measurement", "task": HOSTILE, "points": points, "verdict": [HOSTILE], "weak": False}
    told["why"] = [why, {"plan": "shard=2", "batch": 64, "parts": {}, "remedies": [], "failure": HOSTILE}]
    measured.write_text(json.dumps(told))
    assert shown(browser, report([measured], tmp_path / "measured.html")) == 6
    shown(browser, report([run, measured], tmp_path / "both.html"))


def test_names_and_fields_are_never_markup(browser: chromium.Browser, run: Path, tmp_path: Path) -> None:
    hostile = another(run, "hostile", task=HOSTILE, plan=HOSTILE, fields={HOSTILE: HOSTILE}, name=HOSTILE)
    shown(browser, report([hostile, run], tmp_path / "hostile.html"))
    assert browser.evaluate("document.images.length + document.scripts.length") == 2


def test_keys_reach_and_read_every_plot(browser: chromium.Browser, run: Path) -> None:
    shown(browser, report([run]))
    reached = "document.activeElement.getAttribute('aria-label') || document.activeElement.id"
    seen = set()
    for _ in range(200):
        browser.press("Tab")
        seen.add(browser.evaluate(reached))
    plots = browser.evaluate("[...document.querySelectorAll('svg')].map(one => one.getAttribute('aria-label'))")
    assert set(plots) <= seen
    assert {"theme", "smoothing", "logarithmic"} <= seen
    assert read(browser, "End").startswith("step 9: ")
    assert read(browser, "ArrowLeft").startswith("step 6: ")
    browser.evaluate("document.getElementById('logarithmic').focus()")
    browser.press(" ")
    assert browser.evaluate("document.getElementById('logarithmic').checked")
    browser.evaluate(
        "new Promise(done => { const one = document.querySelector('details');"
        " one.addEventListener('toggle', () => done()); one.querySelector('summary').click(); })"
    )
    assert browser.evaluate("document.querySelector('details').querySelectorAll('tr').length") == 5


def test_light_dark_and_paper(browser: chromium.Browser, run: Path) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    file = report([run])
    browser.prefer("light")
    shown(browser, file)
    light = browser.evaluate(back)
    browser.prefer("dark")
    assert browser.evaluate(back) != light
    choose(browser, "document.getElementById('theme')", "light")
    assert browser.evaluate(back) == light
    browser.prefer("dark", "print")
    assert browser.evaluate(back) == light
    assert browser.evaluate("getComputedStyle(document.getElementById('controls')).display") == "none"
    assert browser.pdf().startswith(b"%PDF")
    browser.prefer("light")
    browser.open(file, width=380)  # a telephone
    assert browser.evaluate("document.documentElement.scrollWidth") <= 380


def test_what_cannot_be_reported_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run"):
        report([tmp_path / "none"])
    with pytest.raises(UsageError, match="nothing to report"):
        report([])
    with pytest.raises(UsageError, match="cannot be written"):
        report([run], tmp_path / "none" / "report.html")
    other = tmp_path / "other.json"
    for text in ("{", "[]", '{"kind": "measurement"}'):
        other.write_text(text)
        with pytest.raises(RunError, match=r"cannot be read|is not a measurement"):
            gather([other])


def test_a_long_curve_keeps_its_peaks_and_gaps() -> None:
    curve = [(step, float(step % 7)) for step in range(10_000)]
    curve[5000] = (5000, 1e6)
    curve[7000] = (7000, None)
    kept = thinned(curve)
    assert len(kept) < 900
    assert (5000, 1e6) in kept
    assert any(value is None for _, value in kept)
    assert kept[-1] == curve[-1]
    assert [step for step, _ in kept] == sorted(step for step, _ in kept)
    assert thinned(curve[:10]) == curve[:10]


def test_numbers_that_json_has_not(run: Path) -> None:
    gathered = gather([run])
    gathered["runs"][0]["used"]["seconds"] = float("inf")
    assert "Infinity" not in html(gathered, "x").partition("<script")[2].partition("</script>")[0]


def test_a_node_idles_until_its_job_begins_again_or_ends(run: Path) -> None:
    size = {"step": 0, "processes": 2, "nodes": 2, "idle_nodes": 1}
    starts = [{**size, "at": 1000.0, "start": 0, "waited": 1}, {**size, "at": 8200.0, "start": 1, "idle_nodes": 2}]
    again = {**size, "at": 50_000.0, "start": 10, "waited": 3}
    idled = another(run, "idled", sizes=[*starts, again])
    (idled / "usage.jsonl").write_text("".join(f'{{"time": {at}, "phases": {{}}}}\n' for at in (1100, 11_800, 53_600)))
    described = gather([idled])["runs"][0]["description"]
    assert described["idle nodes, hours"] == "5.00", "2 h until the next start of the job, 2 x 1 h, 1 h"


def test_all_evidence_against_a_runs_nodes_is_shown_with_its_time(run: Path, tmp_path: Path) -> None:
    noted = another(run, "noted")
    evidence = (("noted", "a " * 200), ("images", "no"), ("noted", "b"))
    lines = [f"1764354300 n1 5.0 {name}: {text}" for name, text in evidence]
    (run.parent / ".failed-nodes").write_text("\n".join(lines))
    notes = gather([noted])["runs"][0]["description"]["notes on nodes"]
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(1764354300))
    assert [note.strip() for note in notes] == [f"{at} n1, job 5.0: {text}" for text in (("a " * 200).strip(), "b")]
