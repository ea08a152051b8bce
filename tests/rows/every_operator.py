"""Judges every operator and module of torch's databases on rows, in forked processes, since a wrong call may end one.

`python -m tests.rows.every_operator [--samples 4] [--draws 1] [--only NAME]` prints what is wrong, and the counts.
"""

# Garbage is collected again once all calls are made: torch's databases are a million objects that stay.
from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()

import argparse
import dataclasses
import json
import os
import pickle
import sys
import time
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.rows import samples, script_calls
from tests.rows.samples import Call
from tests.rows.world import Died, World


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A call and the number of its drawn placement, on a world of `size` processes."""

    call: Call
    draw: int
    size: int
    world: str = "rows"
    """"exchanges": rows are parts of samples, which operators along their dimension exchange; "within" a module."""


ALONG = (
    "conv", "pool", "interpolate", "upsample", "pad", "cat", "stack", "split", "chunk", "narrow", "select", "slice",
    "getitem", "unbind", "roll", "softmax", "norm", "mm", "matmul", "attention", "nll_loss", "cross_entropy", "view",
    "reshape", "Conv", "Pool", "Pad", "Upsample", "Norm", "Softmax", "Attention", "Transformer", "script: attention",
)  # fmt: skip
"""Parts of the names of what is judged once more where rows are exchanged."""


def turns(calls: list[Call], draws: int) -> list[Turn]:
    """Each call `draws` times, on 2 and on 3 processes by turns."""
    made = [
        Turn(call=call, draw=draw, size=2 + (samples.seed(call.name) + draw) % 2)
        for call in calls
        for draw in range(script_calls.placements(call.operator) if call.operator.startswith("script: ") else draws)
    ]
    again = [each for each in made if any(name in each.call.operator for name in ALONG)]
    return [
        *made,
        *(dataclasses.replace(each, world="exchanges") for each in again),
        *(dataclasses.replace(each, world="within") for each in made),
    ]


def judged(todo: list[Turn], undefined: frozenset[str] = frozenset(), *, watch: Any = None) -> Iterator[Any]:
    """Yields the verdict of each turn. `watch` makes what records the lines that a process runs for it."""
    gc.collect()
    gc.freeze()  # what the processes share with this one stays shared
    gc.enable()

    def make(size: int, world: str) -> Any:
        return lambda rank: _working(todo, size, rank, undefined, watch, world)

    kinds = [(size, world) for size in (2, 3) for world in ("rows", "exchanges", "within")]
    worlds = {kind: World(kind[0], make(*kind)) for kind in kinds}
    try:
        for index, turn in enumerate(todo):
            try:
                answers = worlds[turn.size, turn.world].run(index)
            except Died as how:
                yield _died(turn, str(how))
                continue
            yield _verdict(turn, answers)
    finally:
        for world in worlds.values():
            world.close()


def _working(todo: list[Turn], size: int, rank: int, undefined: frozenset[str], watch: Any, world: str) -> Any:
    """Work of a process, given the number of a turn."""
    warnings.simplefilter("ignore")
    from grappe.rows.context import RowsContext
    from grappe.rows.entries import entries
    from grappe.rows.gradients import GradientSums
    from grappe.rows.plans import activate
    from grappe.training.interception import replaced
    from tests.rows.compared import answer

    context = RowsContext(rank=rank, size=size, exchanges=world == "exchanges")
    active, sums = activate(context), GradientSums()
    active.__enter__()
    entered = replaced(*entries(sums))
    if world == "within":
        context.twin = sums.twin
        entered.__enter__()
    lines = watch() if watch is not None else None

    def work(index: int, entered: Any = entered) -> Any:  # which ends when nobody has it
        turn = todo[index]
        again = activate(context) if lines is not None else active  # which forgets what was decided for other calls
        if lines is not None:
            lines.seen.clear()
            again.__enter__()
        made = vars(
            answer(turn.call, turn.draw, context, undefined=turn.call.operator in undefined, within=world == "within")
        )
        return made if lines is None else {**made, "seen": frozenset(lines.seen)}

    return work


def _verdict(turn: Turn, answers: list[dict[str, Any]]) -> Any:
    from tests.rows.compared import Answer, judge

    verdict = judge(turn.call, turn.draw, [Answer(**each) for each in answers], within=turn.world == "within")
    verdict.world = turn.world
    return verdict


def _died(turn: Turn, how: str) -> Any:
    from tests.rows.compared import Verdict

    return Verdict(
        call=f"{turn.call.name} draw {turn.draw}", operator=turn.call.operator, size=turn.size, states="?",
        kind="wrong", why=f"a process died: {how}",
    )  # fmt: skip


def undefined() -> frozenset[str]:
    """Operators whose numbers torch does not define."""
    return frozenset(tomllib.loads((Path(__file__).parent / "exceptions.toml").read_text())["undefined"])


def main() -> None:
    """Prints each wrong turn, and the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--world", help="rows, exchanges or within; all if none")
    parser.add_argument("--out", help="file for the verdicts, pickled")
    parser.add_argument("--commit", action="store_true", help="the turns that judge a commit")
    parser.add_argument("--record", action="store_true", help="writes split.toml")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    calls = list(samples.calls(asked.samples, only=asked.only))
    made = time.process_time()
    print(f"{len({each.operator for each in calls})} operators and modules, {len(calls)} calls, made in {made:.1f} s")
    verdicts = []
    todo = turns(calls, asked.draws)
    if asked.world:
        todo = [each for each in todo if each.world == asked.world]
    if asked.commit:
        from tests.rows.commit_turns import of_commit

        todo = list(of_commit(todo))
    for verdict in judged(todo, undefined()):
        verdicts.append(verdict)
        if verdict.kind == "wrong" and asked.only:
            print(
                f"{verdict.call} on {verdict.size} {verdict.world} | {verdict.states} | {verdict.why}"[:700], flush=True
            )
    print(Counter(each.kind for each in verdicts), f"{sum(os.times()[:4]) - made:.1f} s of CPU")
    if asked.out:
        Path(asked.out).write_bytes(pickle.dumps([vars(each) for each in verdicts]))
    if asked.record:
        _record(verdicts)


def _record(verdicts: list[Any]) -> None:
    verdicts = [each for each in verdicts if each.world == "rows"]
    split = Counter(each.operator for each in verdicts if each.kind == "split")
    gathered: dict[str, set[str]] = {}
    for each in verdicts:
        gathered.setdefault(each.operator, set()).update(each.gathered)
    lines = [f'"{name}" = {json.dumps([split[name], *sorted(names)])}' for name, names in sorted(gathered.items())]
    text = "\n".join([
        "# The test of every operator: how many calls of each operator are computed from own rows alone, and the",
        "# operators of torch that its calls gather. Written by `python -m tests.rows.every_operator --record`.",
        f'torch = "{".".join(torch.__version__.split(".")[:2])}."', "", "[operators]", *lines, "",
    ])  # fmt: skip
    (Path(__file__).parent / "split.toml").write_text(text)


if __name__ == "__main__":
    sys.exit(main())
