"""Each task of the gallery against the plain loop that it replaces, in lines and speed, for docs/gallery-parity.md.

python -m benchmarks.gallery [TASK …]        # half a minute a task on two cores
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.figures import machine, spread, table
from benchmarks.gallery_files import FOLDER, NAMES, file, lines, write
from benchmarks.pacer import Block
from benchmarks.rotation import Pace, rotate

AIM = 0.97
HEAD = ("task", "lines", "plain", "ms a step", "plain", "speed", "by CPU time")


def measure(name: str, pace: Pace, starts: int) -> dict[str, Any]:
    """Lines of both, and the speed of grappe's one process as a ratio to the plain loop's in the same round."""
    blocks: dict[int, list[list[Block]]] = {0: [], 1: []}
    for _ in range(starts):
        with tempfile.TemporaryDirectory(prefix="grappe-bench-", ignore_cleanup_errors=True) as folder:
            for place, taken in rotate([f"by_hand:{name}", f"grappe:{file(name)}"], 1, pace, Path(folder)).items():
                blocks[place] += taken
    pairs = [(plain, ours) for [plain], [ours] in zip(blocks[0], blocks[1], strict=True)]
    wall = spread([plain.wall / ours.wall for plain, ours in pairs])
    cpu = spread([plain.cpu / ours.cpu for plain, ours in pairs])
    return {
        "lines": [lines(name), len((FOLDER / "plain" / f"{name}.py").read_text().splitlines())],
        "milliseconds": [_milliseconds(blocks[place]) for place in (1, 0)],
        "speed": [round(one, 3) for one in (wall.median, wall.low, wall.high)],
        "cpu": [round(one, 3) for one in (cpu.median, cpu.low, cpu.high)],
    }


def _milliseconds(blocks: list[list[Block]]) -> float:
    return round(1e3 * spread([one.wall for [one] in blocks]).median, 2)


def row(name: str, found: dict[str, Any]) -> list[str]:
    """A row under HEAD."""
    ratios = ["{:.2f} ({:.2f} to {:.2f})".format(*found[what]) for what in ("speed", "cpu")]
    return [name, *map(str, found["lines"]), *map(str, found["milliseconds"]), *ratios]


def main() -> None:
    """Measures and prints a markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gallery", description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES, metavar="TASK")
    parser.add_argument("--starts", type=int, default=2, help="how often everyone starts anew")
    parser.add_argument("--rounds", type=int, default=12, help="of each start")
    parser.add_argument("--block", type=int, default=40, help="timed steps of each in a round")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    pace = Pace(rounds=options.rounds, warmup=3, block=options.block)
    before, found = machine(), {}
    for name in options.names:
        found[name] = measure(name, pace, options.starts)
        write("speed", {name: found[name]})
        print(row(name, found[name]), flush=True)
    print(f"\n## The gallery against plain loops\n\nFrom {before}\nto {machine()}. Aim: a speed of at least {AIM}.\n")
    print(table(HEAD, [row(name, one) for name, one in found.items()]))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
