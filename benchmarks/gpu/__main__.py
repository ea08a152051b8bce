"""Runs the parts, the most valuable first, each with its own time limit; writes JSON and a table."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.figures import machine, table
from benchmarks.gpu.part import Part, Row, read_rows

PARTS = {
    "draws": 40,
    "parity": 240,
    "resume": 90,
    "memory": 90,
    "steps": 90,
    "speed": 180,
    "saving": 90,
    "doctor": 60,
}
"""By name: seconds at most. The order is that of their value."""
ROOT = Path(__file__).parents[2]


def main() -> int:
    """Runs the parts that were asked for; exit code 1 if a check failed."""
    options = _options()
    if options.part:
        folder = options.out / options.part
        folder.mkdir(parents=True, exist_ok=True)
        importlib.import_module(f"benchmarks.gpu.{options.part}").main(
            Part(options.device, folder, options.scratch)
        )
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.minutes * 60
    found = {}
    for name in options.only or PARTS:
        limit = min(PARTS[name], end - time.monotonic())
        found[name] = _run(name, limit, options) if limit > 5 else [_left_out(name, "no time was left")]
        _write(options, found)
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
        try:
            code = process.wait(limit)
            problem = f"ended with exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            problem = f"not over after {limit:.0f} s"
        finally:
            _end(process)
    rows = read_rows(folder)
    if problem:
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


def _write(options: argparse.Namespace, found: dict[str, list[Row]]) -> None:
    """Writes what is known so far: a machine may be taken away at any time."""
    content = {
        "device": options.device,
        "machine": _machine(options.device),
        "parts": {name: [dataclasses.asdict(row) for row in rows] for name, rows in found.items()},
    }
    (options.out / "gpu.json").write_text(json.dumps(content, indent=1))
    lines = [f"On {content['machine']}.", ""]
    for name, rows in found.items():
        lines += [f"## {name}", "", table(("what", "verdict", "figures"), [_cells(row) for row in rows]), ""]
    (options.out / "gpu.md").write_text("\n".join(lines))


def _cells(row: Row) -> tuple[str, str, str]:
    return row.name, row.verdict, row.text.replace("|", "\\|").replace("\n", " ")


def _machine(device: str) -> str:
    import torch

    if device == "cuda":
        about = torch.cuda.get_device_properties(0)
        return f"{about.name}, {about.total_memory / 1e9:.0f} GB, torch {torch.__version__}, CUDA {torch.version.cuda}"
    return f"a CPU (nothing here says anything of a GPU), torch {torch.__version__}, {machine()}"


def _options() -> argparse.Namespace:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default=here, help=f"default: {here}, what is here"
    )
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
