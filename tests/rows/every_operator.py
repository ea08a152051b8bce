"""Judges every operator and module of torch's databases on rows, in forked processes, since a wrong call may end one.

`python -m tests.rows.every_operator [--samples 4] [--draws 1] [--only NAME]` prints what is wrong, and the counts.
"""

from __future__ import annotations

import argparse
import os
import pickle
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.rows import samples
from tests.rows.samples import Call

SECONDS = 60
"""Of one call on rows; one that takes longer hangs, and ends its process."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A call and the number of its drawn placement, on a world of `size` processes."""

    call: Call
    draw: int
    size: int


def turns(calls: list[Call], draws: int) -> list[Turn]:
    """Each call `draws` times, on 2 and on 3 processes by turns."""
    return [
        Turn(call=call, draw=draw, size=2 + (samples.seed(call.name) + draw) % 2)
        for call in calls
        for draw in range(draws)
    ]


def judged(todo: list[Turn], undefined: frozenset[str] = frozenset(), *, stop: bool = False) -> Iterator[Any]:
    """Yields the verdict of each turn, from forked processes. `stop`: at the first that is wrong."""
    at = 0
    while at < len(todo):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            _serve(todo[at:], writing, undefined)
        os.close(writing)
        with os.fdopen(reading, "rb") as answers:
            while True:
                try:
                    verdict = pickle.load(answers)
                except (EOFError, pickle.UnpicklingError):
                    break
                at += 1
                yield verdict
                if stop and verdict.kind == "wrong":
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    return
        _, status = os.waitpid(child, 0)
        if at < len(todo):
            yield _died(todo[at], status)
            if stop:
                return
            at += 1


def _died(turn: Turn, status: int) -> Any:
    from tests.rows.compared import Verdict

    how = f"by {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else f"with {status}"
    return Verdict(
        call=f"{turn.call.name} draw {turn.draw}", operator=turn.call.operator, size=turn.size, states="?",
        kind="wrong", why=f"the process ended {how}",
    )  # fmt: skip


def _serve(todo: list[Turn], writing: int, undefined: frozenset[str]) -> None:
    """Judges in a process of its own, which ends without anything that its parent left to do."""
    try:
        from tests.rows.compared import judge
        from tests.rows.lockstep import Lockstep

        warnings.simplefilter("ignore")
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        with os.fdopen(writing, "wb") as answers, Lockstep(2) as two, Lockstep(3) as three:
            for turn in todo:
                signal.alarm(SECONDS)
                verdict = judge(
                    turn.call, {2: two, 3: three}[turn.size], turn.draw, turn.call.operator in undefined
                )
                pickle.dump(verdict, answers)
                answers.flush()
        os._exit(0)
    except BrokenPipeError:
        os._exit(1)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(2)


def main() -> None:
    """Prints each wrong turn, and the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", help="file for the verdicts, pickled")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    calls = list(samples.calls(asked.samples, only=asked.only))
    made = time.process_time()
    print(f"{len({each.operator for each in calls})} operators and modules, {len(calls)} calls, made in {made:.1f} s")
    verdicts = []
    for verdict in judged(turns(calls, asked.draws)):
        verdicts.append(verdict)
        if verdict.kind == "wrong":
            print(f"{verdict.call} x{verdict.size} | {verdict.states} | {verdict.why}"[:700], flush=True)
    print(Counter(each.kind for each in verdicts), f"{sum(os.times()[:4]) - made:.1f} s of CPU")
    if asked.out:
        with open(asked.out, "wb") as file:  # noqa: PTH123
            pickle.dump([vars(each) for each in verdicts], file)


if __name__ == "__main__":
    sys.exit(main())
