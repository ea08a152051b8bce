"""Every operator and module of torch's databases gives on rows what it gives on plain tensors, or is refused by name.

Forward, gradient and gradient's gradient, in place, `out=`, through views; on 2 and 3 processes with uneven rows, in
fp64. Placements and samples are drawn by fixed seeds. `python -m tests.rows.every_operator --only NAME` shows one.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SECONDS = 1800
"""For all of it on a busy machine; of processor time it takes about a minute."""

EXCEPTIONS = tomllib.loads((HERE / "exceptions.toml").read_text())
SPLIT = tuple((HERE / "split.txt").read_text().split())


def verdicts_of(folder: Path, *options: str) -> list[dict[str, Any]]:
    """Judges all operators in a program of its own, which forks processes, and so has no threads."""
    out = folder / "verdicts"
    command = [sys.executable, "-W", "ignore", "-m", "tests.rows.every_operator", "--out", str(out), *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=HERE.parent.parent, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return pickle.loads(out.read_bytes())


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return verdicts_of(tmp_path_factory.mktemp("gate"))


def allowed(verdict: dict[str, Any]) -> str:
    """The kind of exception that is made for an operator."""
    return next((kind for kind, names in EXCEPTIONS.items() if verdict["operator"] in names), "")


def test_no_operator_is_wrong(verdicts: list[dict[str, Any]]) -> None:
    wrong = [each for each in verdicts if each["kind"] == "wrong" and allowed(each) != "different"]
    texts = [f"{each['call']} on {each['size']}: {each['states']}: {each['why']}" for each in wrong]
    assert not texts, f"{len(texts)} calls are wrong:\n" + "\n".join(texts[:40])


def test_refused_operators_are_listed(verdicts: list[dict[str, Any]]) -> None:
    refused = {each["operator"]: each["why"] for each in verdicts if each["kind"] == "refused"}
    unlisted = {name: why for name, why in refused.items() if name not in EXCEPTIONS["refused"]}
    assert not unlisted


def test_every_exception_is_needed(verdicts: list[dict[str, Any]]) -> None:
    operators = {each["operator"] for each in verdicts}
    refused = {each["operator"] for each in verdicts if each["kind"] == "refused"}
    wrong = {each["operator"] for each in verdicts if each["kind"] == "wrong"}
    assert set(EXCEPTIONS["refused"]) <= refused
    assert set(EXCEPTIONS["different"]) <= wrong
    assert set(EXCEPTIONS["undefined"]) <= operators


def test_operators_of_batches_are_split(verdicts: list[dict[str, Any]]) -> None:
    """Rows of the first dimension, which is the batch's, are not gathered."""
    kinds = defaultdict(Counter)
    for each in verdicts:
        kinds[each["operator"]][each["kind"]] += 1
    gathered = [name for name in SPLIT if not kinds[name]["split"]]
    assert not gathered, f"gathered always: {gathered}"


def test_counts(verdicts: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    by_operator = defaultdict(set)
    for each in verdicts:
        by_operator[each["operator"]].add(each["kind"])
    split = sum(kinds == {"split"} for kinds in by_operator.values())
    gathered = sum("gathered" in kinds for kinds in by_operator.values())
    refused = sum("refused" in kinds for kinds in by_operator.values())
    with capsys.disabled():
        print(
            f"\n{len(by_operator)} operators and modules, {len(verdicts)} calls on rows: {split} split in all, "
            f"{gathered} gathered in some, {refused} refused in some"
        )
    assert len(by_operator) > 700
    assert split > 100
