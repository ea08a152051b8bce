"""Proof of scaling: each of the site's rules kept and broken, by runs whose costs are planted, and the page of them."""

import copy
import csv
import json
import re
import shutil
from pathlib import Path

import pytest

from grappe import sites
from grappe.cli.commands import app
from grappe.contrib.proposal.proposal import content, latex, rows_of, verdicts
from grappe.contrib.slurm.jobs import record_job
from grappe.errors import UsageError
from grappe.training.run import METRICS, Run
from tests.parity.tasks import Images
from tests.training.test_training import train
from tests.verbs.report.test_report import browser, shown  # noqa: F401 (a fixture)

FIXED, SHARED = 0.2, 0.8  # seconds of a step, for each process and for the whole batch of 8
EFFICIENCY = {count: (FIXED + SHARED) / (count * FIXED + SHARED) for count in (1, 2, 4)}
"""Of strong scaling, as planted: 1, 0.83, 0.63."""
RULES = ("counts", "input", "start-up", "efficiency", "wall", "utilisation", "script", "losses")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("proposal") / "trained"
    train(folder, Images(epochs=4, batch_size=8), steps=10)
    return folder


def planted(trained: Path, nodes: int, *, batch: int = 8, fixed: float = FIXED, start: float = 20.0, **changes) -> Path:
    """A run of one process on each node whose step took FIXED seconds, and SHARED of its share of 8 samples."""
    folder = trained.parent / f"n{nodes}-b{batch}-{len(list(trained.parent.iterdir()))}"
    shutil.copytree(trained, folder)
    made = Run(folder).read_description()
    step = fixed + SHARED * batch / 8 / nodes
    cost = copy.deepcopy(made["costs"][0])
    cost["timing"]["step"]["median"] = step
    cost["timing"]["totals"]["start"] = start
    seconds = start + 100 * step
    Run(folder).describe(**{
        "plan": "device=cpu" + (f",replicate={nodes}" if nodes > 1 else ""),
        "fields": {**made["fields"], "batch_size": batch},
        "costs": [cost | {"rank": rank, "cores": 2} for rank in range(nodes)],
        "sizes": [{"at": 0, "step": 0, "processes": nodes, "nodes": nodes}],
        "used": {"seconds": seconds, "cpu_hours": nodes * seconds / 3600, "core_hours": 2 * nodes * seconds / 3600},
        **changes,
    })  # fmt: skip
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / "submit-1.sh").write_text(f"#!/bin/bash\n#SBATCH --nodes={nodes}\n")
    record_job(folder, "7", "roihu", "cost")
    return folder


def judged(places: list[Path], site: str = "roihu") -> dict[str, bool | None]:
    rows, place = rows_of(places), sites.find(site)
    made = content(rows, place, None)
    assert [check["state"] for check in made["checks"]]
    kept = next(row for row in rows if row["kind"] == "strong" and row["nodes"] == made["nodes"])
    return dict(
        zip(RULES, (passed for passed, _, _ in verdicts(rows, kept, place, "\n".join(made["script"]))), strict=True)
    )


def test_efficiency_is_the_planted_one_and_weak_scaling_has_its_own(trained: Path) -> None:
    rows = rows_of([*(planted(trained, count) for count in (4, 1, 2)), planted(trained, 4, batch=32)])
    strong = {row["nodes"]: row["efficiency"] for row in rows if row["kind"] == "strong"}
    assert strong == pytest.approx(EFFICIENCY)
    (weak,) = [row for row in rows if row["kind"] == "weak"]
    assert (weak["nodes"], weak["batch"], weak["efficiency"]) == (4, 32, pytest.approx(1.0))
    assert [row["nodes"] for row in rows] == [1, 2, 4, 4]


def test_each_rule_is_kept(trained: Path) -> None:
    assert judged([planted(trained, count, fixed=0.01) for count in (1, 2, 4)]) == dict.fromkeys(RULES, True)


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_fails_alone(trained: Path, rule: str) -> None:
    counts = {"counts": (1, 2)}.get(rule, (1, 2, 4))
    fixed = FIXED if rule == "efficiency" else 0.01
    places = [planted(trained, count, fixed=fixed) for count in counts]
    last = Run(places[-1])
    made = last.read_description()
    if rule == "input":
        last.describe(dataset="another")
    elif rule == "start-up":
        last.describe(costs=[cost | {"timing": cost["timing"] | {"totals": {"start": 30.0}}} for cost in made["costs"]])
    elif rule == "wall":
        last.describe(used=made["used"] | {"seconds": None})
    elif rule == "utilisation":
        last.describe(costs=[cost | {"gpus": 1} for cost in made["costs"]])  # without NVML
    elif rule == "script":
        for place in places:
            shutil.rmtree(place / "logs")
    elif rule == "losses":
        file = places[-1] / METRICS
        file.write_text(re.sub(r'"loss":(\d)\.(\d)', r'"loss":\1.9\2', file.read_text()))
    assert [name for name, passed in judged(places).items() if passed is False] == [rule]


def test_losses_of_other_batches_and_of_runs_without_any_are_not_compared(trained: Path) -> None:
    places = [planted(trained, count, fixed=0.01) for count in (1, 2, 4)]
    (places[1] / METRICS).write_text("")
    assert judged(places)["losses"] is None
    assert judged(places[:1]) == dict.fromkeys(RULES, True) | {"counts": False, "losses": None}


def test_a_site_without_a_rule_has_the_general_one_and_a_stricter_rule_counts(trained: Path, monkeypatch) -> None:
    places = [planted(trained, count) for count in (1, 2)]
    assert judged(places, "narval")["efficiency"] is True
    home = trained.parent / "home"
    (home / "grappe" / "sites").mkdir(parents=True)
    (home / "grappe" / "sites" / "own.toml").write_text('like = "roihu"\n[scaling]\nefficiency = 0.9\ncounts = 2\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    assert [judged(places, "own")[name] for name in ("efficiency", "counts")] == [False, True]
    (home / "grappe" / "sites" / "own.toml").write_text('like = "roihu"\n[scaling]\nefficiency = 90\n')
    with pytest.raises(UsageError, match=r"scaling has a share above 1: write 0\.75"):
        sites.find("own")


def test_the_page_its_tables_and_the_exit_code(trained: Path, tmp_path: Path, capsys, browser) -> None:  # noqa: F811
    places = [planted(trained, count) for count in (1, 2, 4)] + [planted(trained, 4, batch=32)]
    out = tmp_path / "proposal.html"
    words = ["measure", "--proposal", "--gather", *map(str, places), "--out", str(out)]
    assert app([*words, "--training-steps", "36000"]) == 1
    said = capsys.readouterr().out
    assert "failed  parallel efficiency of at least 75%" in said
    assert "62.5% on 4 nodes; the largest count that keeps it: 2" in said
    assert "to apply for: 24.00 core-hours" in said  # 36000 steps of 0.6 s on two nodes with two cores each
    rows = list(csv.DictReader((tmp_path / "proposal.csv").open()))
    assert [(row["scaling"], row["nodes"], float(row["efficiency"])) for row in rows] == [
        *(("strong", str(count), pytest.approx(value)) for count, value in EFFICIENCY.items()),
        ("weak", "4", pytest.approx(1.0)),
    ]  # fmt: skip
    table = (tmp_path / "proposal.tex").read_text()
    assert r"strong & 2 & 2 & 8 & 13.33 & 1.67 & 83.3\% & 80.0 & 25\% & 50\%" in table
    assert table.count(r"\\") == 5 and r"\toprule" in table
    assert shown(browser, out) == 4
    page = browser.evaluate("document.getElementById('plots').innerText")
    for text in ("✗ failed", "docs.csc.fi", "#SBATCH --nodes=2", "24.00 core-hours", "weak scaling: not compared"):
        assert text in page
    browser.prefer(media="print")
    wide = "Math.max(...[...document.querySelectorAll('.wide')].map(one => one.scrollWidth - one.clientWidth))"
    browser.open(out, width=718)  # of A4, without its margins
    assert browser.evaluate(wide) <= 0, "a table is cut on paper"
    assert browser.pdf().startswith(b"%PDF")
    browser.prefer()
    assert app([*words, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["nodes"] == 2


def test_runs_that_are_not_of_one_proposal_are_refused(trained: Path) -> None:
    for other in (planted(trained, 2, batch=12), planted(trained, 1, plan="device=cpu,threads=2")):
        with pytest.raises(UsageError, match="not of one proposal"):
            rows_of([planted(trained, 1), other])
    with pytest.raises(UsageError, match="has not ended"):
        rows_of([planted(trained, 1), planted(trained, 2, costs=[], status="running")])


def test_latex_is_escaped() -> None:
    cells = r"a_b & 5% \x {}", "~"
    assert r"a\_b \& 5\% \textbackslash{}x \{\} & \textasciitilde{} \\" in latex(["a", "b"], [cells])


def test_jobs_of_three_node_counts_with_strong_and_weak_scaling(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["measure", "--proposal", "--site", "roihu", "--account", "project_1", "--repeats", "1", "--dry-run"]
    assert app([*words, "digits", "batch_size=64"]) == 0
    said = capsys.readouterr()
    assert "5 jobs on 1, 2, 4 nodes: strong and weak scaling, 300 steps each" in said.err
    nodes = re.findall(r"BATCH --nodes=(\d+)", said.out)
    batches = re.findall(r"-m grappe train digits batch_size=(\d+)", said.out)
    assert list(zip(nodes, batches, strict=True)) == [("1", "64"), ("2", "64"), ("2", "128"), ("4", "64"), ("4", "256")]
    assert re.findall(r"replicate=(\d+) --run \S+ --data", said.out) == ["4", "8", "8", "16", "16"]
    Path("train.py").write_text("import torch")
    assert app([*words, "--nodes", "2,4", "--plan", "replicate=4", "--script", "train.py", "--epochs", "2"]) == 0
    said = capsys.readouterr()
    assert "2 jobs on 2, 4 nodes: strong scaling, of the whole script" in said.err
    assert "the proof needs 3 node counts (docs.csc.fi" in said.err
    assert re.findall(r"grappe launch --plan (\S+) .*-- train.py --epochs 2", said.out) == [
        "replicate=4",
        "replicate=8",
    ]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["digits"], "--proposal takes --site and a task, or -- train.py"),
        (["digits", "--site", "roihu", "--script", "train.py"], "--proposal takes --site and a task, or -- train.py"),
        (["digits", "--site", "roihu", "-p", "shard=2", "-p", "shard=4"], "one plan at one batch size"),
        (["digits", "--site", "roihu", "--account", "project_1", "batch_size=63"], "not shared evenly by 4 processes"),
        (["digits", "--site", "roihu", "--account", "project_1", "--nodes", "1,16"], "gpularge: at most 10 nodes"),
    ],
)
def test_what_it_cannot_prove_is_refused(here: Path, words: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        app(["measure", "--proposal", "--dry-run", *words])


def test_options_of_a_proof_are_refused_without_it() -> None:
    for words in (["--nodes", "1,2"], ["--training-steps", "9"]):
        with pytest.raises(UsageError, match="are for --proposal"):
            app(["measure", "digits", *words])
