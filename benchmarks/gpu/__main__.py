"""Runs the parts, the most valuable first, each with its own time limit; writes JSON and a table."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.figures import table
from benchmarks.gpu import machine
from benchmarks.gpu.part import Part, Row, read_rows

PARTS = {
    "draws": 40,
    "parity": 300,
    "own_loop": 180,
    "speed": 150,
    "block": 120,
    "added": 150,
    "saving": 120,
    "images": 150,
    "resume": 120,
    "clocks": 60,
    "steps": 60,
    "memory": 90,
    "nccl": 60,
    "doctor": 60,
    "kernels": 120,
}
"""By name: seconds at most on a GPU. The order is that of their value."""
LATE = "no time was left"
ROOT = Path(__file__).parents[2]


def main() -> int:
    """Runs the parts that were asked for; exit code 1 if a check failed."""
    options = _options()
    if options.part:
        folder = options.out / options.part
        folder.mkdir(parents=True, exist_ok=True)
        importlib.import_module(f"benchmarks.gpu.{options.part}").main(Part(options.device, folder, options.scratch))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.minutes * 60
    found = {}
    about = _described(options.device)
    for name in options.only or PARTS:
        limit = end - time.monotonic()
        if options.device != "cpu":  # a GPU's time is short, and a machine without one may be busy
            limit = min(limit, PARTS[name])
        found[name] = _run(name, limit, options) if limit > 5 else [_left_out(name, LATE)]
        _write(options, about, found)
    if late := [name for name, rows in found.items() if any(row.text.startswith(LATE) for row in rows)]:
        print(f"no time was left for {', '.join(late)}: try them with --only {' '.join(late)}")
    return int(any(row.verdict == "failed" for rows in found.values() for row in rows))


def _run(name: str, limit: float, options: argparse.Namespace) -> list[Row]:
    """Runs a part as a program, so that what it breaks stays its own; all its processes end with it."""
    print(f"== {name} (at most {limit:.0f} s)", flush=True)
    folder = options.out / name
    (folder / "rows.jsonl").unlink(missing_ok=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--device", options.device]
    with tempfile.TemporaryDirectory(prefix="grappe-gpu-", ignore_cleanup_errors=True) as scratch:
        command += ["--out", str(options.out), "--scratch", scratch]
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        late = False
        try:
            code = process.wait(limit)
            problem = f"ended with exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            problem, late = f"not over after {limit:.0f} s", True
        finally:
            _end(process)
    rows = read_rows(folder)
    if problem and late and limit < PARTS[name]:
        rows.append(_left_out(name, f"{LATE} for more than these {limit:.0f} s of it"))
    elif problem:
        rows.append(Row(name=f"the part {name}", verdict="failed", text=problem))
        print(f"failed     the part {name} {problem}", flush=True)
    print(f"== {name}: {time.monotonic() - began:.0f} s", flush=True)
    return rows


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _left_out(name: str, reason: str) -> Row:
    return Row(name=f"the part {name}", verdict="not tried", text=reason)


def _described(device: str) -> str:
    """Describes the machine in a process of its own: this one holds no memory of the GPU that parts measure."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(machine.describe, (device,))


def _write(options: argparse.Namespace, about: str, found: dict[str, list[Row]]) -> None:
    """Writes what is known so far: a machine may be taken away at any time."""
    content = {
        "device": options.device,
        "machine": about,
        "parts": {name: [dataclasses.asdict(row) for row in rows] for name, rows in found.items()},
    }
    (options.out / "gpu.json").write_text(json.dumps(content, indent=1))
    lines = [f"On {content['machine']}.", ""]
    for name, rows in found.items():
        lines += [f"## {name}", "", table(("what", "verdict", "figures"), [_cells(row) for row in rows]), ""]
    (options.out / "gpu.md").write_text("\n".join(lines))


def _cells(row: Row) -> tuple[str, str, str]:
    return row.name, row.verdict, row.text.replace("|", "\\|").replace("\n", " ")


def _options() -> argparse.Namespace:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=here, help=f"default: {here}, what is here")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="these parts alone")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all parts together (default 10)")
    default = Path(tempfile.gettempdir()) / "grappe-gpu"
    parser.add_argument("--out", type=Path, default=default, help=f"folder of results (default {default})")
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.absolute()
    return options


if __name__ == "__main__":
    raise SystemExit(main())
