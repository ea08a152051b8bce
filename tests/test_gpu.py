"""The proof on a GPU, run on this machine's CPU: its code works, its table says that no GPU was seen."""

import json
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import photos
from benchmarks.gpu.__main__ import LATE, PARTS
from benchmarks.gpu.clocks import busy
from benchmarks.gpu.part import Aim, Part, read_rows

from tests.commands import ran

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def run(out: Path, *arguments: str) -> tuple[int, dict, str]:
    command = (sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--out", str(out))
    done = ran(*command, *arguments, cwd=ROOT)
    return done.returncode, json.loads((out / "gpu.json").read_text())["parts"], done.stdout + done.stderr


def verdicts(rows: list[dict]) -> list[str]:
    return [row["verdict"] for row in rows]


def test_parts_report_what_they_found(tmp_path: Path) -> None:
    code, parts, output = run(tmp_path, "--only", "draws", "saving", "steps", "doctor")
    assert code == 0, output
    assert {row["verdict"] for row in parts["draws"]} == {"not tried"}
    assert all(" 0 of " in row["text"] for row in parts["draws"])
    assert verdicts(parts["steps"]) == ["not tried", "passed"]
    assert verdicts(parts["doctor"]) == ["passed"] * 2 + ["not tried"] * 3
    stall, whole, copy = parts["saving"]
    assert stall["figures"]["state_bytes"] > 0
    assert whole["verdict"] == "passed"
    assert copy["figures"]["stall_seconds"] > 0
    assert copy["text"].endswith("aim: at most 50 ms on an H200")
    table = (tmp_path / "gpu.md").read_text()
    assert table.startswith("On a CPU (nothing here says anything of a GPU)")
    assert "| draw, 5 numbers a sample | not tried |" in table


def test_speeds_are_measured(tmp_path: Path) -> None:
    code, parts, output = run(tmp_path, "--only", "speed", "block", "added", "images")
    assert code == 0, output
    for name in ("speed", "block"):
        product, eager, *compiled = parts[name]
        assert product["figures"]["flops"] > 1e9
        assert eager["figures"]["ratio_to_by_hand"] > 0
        assert "of the data sheet's peak on an H200" in eager["text"]
        assert {row["verdict"] for row in compiled} == {"not tried"}
    assert parts["added"][0]["figures"]["by_hand_seconds"] > 0
    assert verdicts(parts["images"]) == ["measured"] * 3 + ["not tried"]
    assert min(row["figures"]["images_per_second"] for row in parts["images"][:3]) > 0


def test_what_needs_cuda_is_not_tried(tmp_path: Path) -> None:
    code, parts, output = run(tmp_path, "--only", "clocks", "nccl", "kernels")
    assert code == 0, output
    assert verdicts(parts["clocks"]) == ["passed", "not tried", "passed", "not tried"]
    assert parts["nccl"][-1]["name"] == "NCCL in one process"
    assert verdicts(parts["nccl"]) == ["passed", "passed", "measured", "passed", "not tried"]
    fused = [row for row in parts["kernels"] if "fused Adam" in row["name"]]
    assert verdicts(fused or parts["kernels"]) == ["not tried"]


def test_a_part_without_time_is_not_tried(tmp_path: Path) -> None:
    code, parts, output = run(tmp_path, "--minutes", "0")
    assert code == 0
    assert set(parts) == set(PARTS)
    assert {row["verdict"] for rows in parts.values() for row in rows} == {"not tried"}
    assert f"{LATE} for {', '.join(PARTS)}: try them with --only" in output


def test_an_aim_is_judged_on_a_gpu_alone(tmp_path: Path) -> None:
    share, stall = Aim(figure=0.52, form="{:.0%}"), Aim(figure=50, form="{:.0f} ms", at_most=True)
    assert share.text(0.53, on_gpu=True) == "aim: at least 52%, reached"
    assert share.text(0.51, on_gpu=True) == "aim: at least 52%, MISSED"
    assert stall.text(51, on_gpu=True) == "aim: at most 50 ms, MISSED"
    assert stall.text(51, on_gpu=False) == "aim: at most 50 ms on an H200"
    part = Part("cuda", tmp_path, tmp_path)
    part.measured("speed", "half", aim=share, found=0.5, rate=1.0)
    (row,) = read_rows(tmp_path)
    assert row.verdict == "measured"
    assert row.text == "half; aim: at least 52%, MISSED"
    assert row.figures == {"rate": 1.0, "aim": 0.52, "against_aim": 0.5}


def test_a_trace_is_busy_where_its_kernels_are(tmp_path: Path) -> None:
    spans = [("kernel", 0, 10), ("kernel", 5, 10), ("gpu_memcpy", 20, 5), ("gpu_user_annotation", 0, 100)]
    events = [{"ph": "X", "cat": kind, "ts": at, "dur": dur} for kind, at, dur in spans]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": [*events, {"ph": "M"}]}))
    assert busy(file, {"kernel", "gpu_memcpy"}) == pytest.approx((20e-6, 25e-6))


def test_photographs_have_the_size_of_real_ones(tmp_path: Path) -> None:
    kilobytes = photos.make(tmp_path, 6, 2)
    assert 80 < kilobytes < 150
    assert len(list((tmp_path / "class0001").iterdir())) == 3


def test_a_blocks_operations_are_what_torch_counts() -> None:
    from benchmarks.gpu.llama import Llama
    from torch.utils.flop_counter import FlopCounterMode

    task = Llama(width=64, depth=2, heads=2, hidden=172, vocabulary=64, context=32, batch_size=2, samples=16)
    data = task.data("train", Path())
    inputs, targets = torch.as_tensor(data.inputs[:2]), torch.as_tensor(data.targets[:2])
    with FlopCounterMode(display=False) as counter:
        task.loss(task.model()(inputs), targets).sum().backward()
    assert counter.get_total_flops() == pytest.approx(task.flops_per_token() * inputs.numel(), rel=0.15)
