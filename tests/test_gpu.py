"""The proof on a GPU, run on this machine's CPU: its code works, its table says that no GPU was seen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.__main__ import PARTS

ROOT = Path(__file__).parents[1]


def run(out: Path, *arguments: str) -> tuple[int, dict, str]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, json.loads((out / "gpu.json").read_text())["parts"], done.stdout + done.stderr


def test_parts_report_what_they_found(tmp_path: Path) -> None:
    code, parts, output = run(tmp_path, "--only", "draws", "saving", "steps")
    assert code == 0, output
    assert {row["verdict"] for row in parts["draws"]} == {"passed"}
    assert [row["verdict"] for row in parts["steps"]] == ["not tried", "passed"]
    assert parts["saving"][0]["figures"]["stall_seconds"] >= 0
    table = (tmp_path / "gpu.md").read_text()
    assert table.startswith("On a CPU (nothing here says anything of a GPU)")
    assert "| draw, 5 numbers a sample | passed |" in table


def test_a_part_without_time_is_not_tried(tmp_path: Path) -> None:
    code, parts, _ = run(tmp_path, "--minutes", "0")
    assert code == 0
    assert set(parts) == set(PARTS)
    assert {row["verdict"] for rows in parts.values() for row in rows} == {"not tried"}
