"""Every operator and module of torch's databases gives on rows what it gives on plain tensors, or is refused by name.

Forward, gradient and gradient's gradient, in place, `out=`, through views; on 2 and 3 processes with uneven rows, in
fp64. Samples and placements are drawn by fixed seeds. `python -m tests.rows.every_operator --only NAME` shows one.

A commit is judged by each operator, and by so many of their turns that ten run each line of the rules if as many can
(`commit_turns.py`); also where rows are parts of samples, whose neighbours are exchanged. At night four samples of each
operator are judged, in each of its forms; in the soak all samples, twice.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rows.commit_turns import of_tables, split_turns

HERE = Path(__file__).parent
SECONDS = 3000
"""For all of it on a busy machine; of processor time the turns of a commit take less than a minute."""
ALL = 100_000
"""Samples of an operator: more than there are."""
EXCEPTIONS: dict[str, dict[str, str]] = tomllib.loads((HERE / "exceptions.toml").read_text())
SPLIT: dict[str, Any] = tomllib.loads((HERE / "split.toml").read_text())
CORE = (
    "add", "mul", "sub", "exp", "log", "sigmoid", "tanh", "where", "clamp", "sqrt", "mean", "sum", "amax",
    "softmax", "log_softmax", "cat", "stack", "reshape", "view", "transpose", "permute", "unsqueeze", "flatten",
    "mm", "matmul", "bmm", "addmm", "nn.functional.linear", "nn.functional.conv3d", "nn.functional.gelu",
    "nn.functional.silu", "nn.functional.embedding", "nn.functional.cross_entropy", "nn.functional.mse_loss",
    "nn.functional.batch_norm", "nn.functional.layer_norm", "nn.functional.group_norm", "nn.functional.dropout",
    "nn.functional.max_pool2d", "nn.functional.avg_pool2d", "nn.functional.adaptive_avg_pool2d",
    "nn.functional.scaled_dot_product_attention", "nn.functional.binary_cross_entropy_with_logits", "gather",
    "argmax", "topk", "eq", "lt", "ne", "nn.Linear", "nn.Conv2d", "nn.BatchNorm2d", "nn.LayerNorm", "nn.GroupNorm",
    "nn.ReLU", "nn.GELU", "nn.Embedding", "nn.CrossEntropyLoss", "nn.MSELoss", "nn.MaxPool2d", "nn.functional.relu",
    "div.no_rounding_mode", "nn.functional.pad.constant", "script: chain convolution", "script: chain linear, relu",
    "script: chain losses", "script: chain embedding", "script: attention", "script: transformer", "script: LSTM",
    "script: batch_norm float64", "script: layer_norm float64", "script: dropout and its gradient",
    "script: interpolate nearest 4", "script: permuted", "script: a label's column",
    "script: write masked", "script: chain vae",
)  # fmt: skip
"""Operators and modules of nearly every training: some call of each must not be gathered, with any torch."""


def judged(folder: Path, *options: str) -> list[dict[str, Any]]:
    """Judges all operators in a program of its own, which forks processes, and so has no threads."""
    out = folder / "verdicts"
    command = [sys.executable, "-W", "ignore", "-m", "tests.rows.every_operator", "--out", str(out), *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=HERE.parent.parent, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return pickle.loads(out.read_bytes())


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return judged(tmp_path_factory.mktemp("gate"), "--commit")


def wrong(verdicts: list[dict[str, Any]]) -> str:
    """Names the calls that are wrong, or refused, without being among the exceptions."""
    texts = [
        f"{each['call']} on {each['size']} processes, {each['states']}: {each['kind']}: {each['why']}"
        for each in verdicts
        if (each["kind"] == "wrong" and each["operator"] not in EXCEPTIONS["different"])
        or (each["kind"] == "refused" and not _may_be_refused(each))
    ]
    return f"{len(texts)} calls:\n" + "\n".join(texts[:50]) if texts else ""


@pytest.mark.timeout(SECONDS)
def test_no_operator_is_wrong(verdicts: list[dict[str, Any]]) -> None:
    assert not wrong(verdicts)


def _may_be_refused(verdict: dict[str, Any]) -> bool:
    """Tells whether a refusal is expected: where rows are exchanged, what has no rule is refused."""
    kinds = {"exchanges": None, "within": ("refused", "within"), "rows": ("refused",)}[verdict["world"]]
    return kinds is None or any(verdict["operator"] in EXCEPTIONS[kind] for kind in kinds)


def test_every_exception_is_needed(verdicts: list[dict[str, Any]]) -> None:
    of_kind = {kind: {each["operator"] for each in verdicts if each["kind"] == kind} for kind in ("refused", "wrong")}
    assert set(EXCEPTIONS["refused"]) <= of_kind["refused"]
    assert set(EXCEPTIONS["different"]) <= of_kind["wrong"]
    assert set(EXCEPTIONS["undefined"]) <= {each["operator"] for each in verdicts}
    assert all(reason for kind in EXCEPTIONS.values() for reason in kind.values())


def more_gathered(verdicts: list[dict[str, Any]], least: dict[str, int]) -> str:
    """Names the operators of which fewer calls than `least` are split, and what is gathered that was not."""
    if not torch.__version__.startswith(SPLIT["torch"]):
        return ""
    verdicts = [each for each in verdicts if each["world"] == "rows"]
    split = Counter(each["operator"] for each in verdicts if each["kind"] == "split")
    fewer = {name: split[name] for name, count in least.items() if split[name] < count}
    before = {(at, name) for name, (_, *gathered) in SPLIT["operators"].items() for at in gathered}
    new = sorted({(at, each["operator"]) for each in verdicts for at in each["gathered"]} - before)
    return f"gathered in more calls than they were: {fewer}; operators of torch: {new}" if fewer or new else ""


def test_operators_that_can_be_split_are_not_gathered(verdicts: list[dict[str, Any]]) -> None:
    """split.toml has how many calls of each are computed from own rows alone, and what the others gather."""
    split = {each["operator"] for each in verdicts if each["kind"] == "split" and each["world"] != "exchanges"}
    assert set(CORE) <= split
    assert not more_gathered(verdicts, split_turns())


def test_every_rule_is_proven(verdicts: list[dict[str, Any]]) -> None:
    """No rule stands in the tables that none of the calls asks for."""
    from grappe.rows.plans import PROCEDURES, TABLE

    asked = of_tables([name for each in verdicts for name in each["rules"]])
    assert {*TABLE, *PROCEDURES} - asked == set(EXCEPTIONS["unproven"])


def test_counts(verdicts: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    kinds: dict[str, Counter[str]] = {}
    for each in verdicts:
        kinds.setdefault(each["operator"], Counter())[each["kind"]] += 1
    calls = Counter(each["kind"] for each in verdicts)
    never = sum(not of["gathered"] for of in kinds.values())
    with capsys.disabled():
        print(f"\n{len(kinds)} operators and modules ({never} never gathered), {len(verdicts)} calls: {dict(calls)}")
    assert len(kinds) > 700
    assert calls["split"] > 900


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS)
def test_no_operator_is_wrong_in_any_turn(tmp_path: Path) -> None:
    verdicts = judged(tmp_path)
    assert not wrong(verdicts)
    assert not more_gathered(verdicts, {name: count for name, (count, *_) in SPLIT["operators"].items()})


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_no_operator_is_wrong_with_any_sample(tmp_path: Path) -> None:
    assert not wrong(judged(tmp_path, "--samples", str(ALL), "--draws", "2"))
