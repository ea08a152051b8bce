"""A record of a plain process says the same of the same machine, and names the step, unit and operator that differ."""

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from grappe import Arrays, Task
from grappe.contrib.lab import record
from grappe.contrib.lab.sketch import CallLog, gaps, moved, sketch
from grappe.errors import UsageError
from grappe.launch.rank import ProcessRank
from grappe.plan import Plan
from grappe.training import short_run
from grappe.training.task_reference import TaskReference
from grappe.verbs.verify.trained_by_hand import ReferenceRequest

aten = torch.ops.aten


class Mixed(nn.Module):
    """Most kinds of layers, small."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.group = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear")
        self.embed, self.attend = nn.Embedding(17, 16), nn.Linear(16, 48)
        self.layer, self.wide, self.head = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        maps = F.avg_pool2d(self.up(self.group(F.gelu(self.norm(self.conv(images))))), 2)
        words = self.embed((images[:, 0, 0] * 8).long().clamp(0, 16))
        queries, keys, values = self.attend(words).view(len(images), 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
        words = F.scaled_dot_product_attention(queries, keys, values).transpose(1, 2).reshape(len(images), 8, 16)
        joined = self.layer(words.mean(1) + F.max_pool2d(maps, 4).flatten(1)).tanh()
        return self.head(F.silu(self.wide(joined)).softmax(-1) + F.relu(self.wide(joined)))


class Task30(Task):
    """Trains all of it."""

    batch_size: int = 16

    def model(self) -> nn.Module:
        return Mixed()

    def data(self, split: str, folder: Path) -> Arrays:
        generator = torch.Generator().manual_seed(1)
        return Arrays(torch.rand(64, 1, 8, 8, generator=generator), torch.arange(64) % 10)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(named_parameters, lr=0.01)


def recorded(other: record.Recorded | None = None, precision: str = "fp32") -> record.Recorded:
    reference = TaskReference(name="/home/me/mixed.py", value=Task30())
    plan = Plan.parse(f"threads=1,precision={precision}")
    request = ReferenceRequest(plan=plan, steps=2, folder=Path())
    work = functools.partial(record.recorded_steps, request, reference, other)
    return short_run.with_task(work, reference, request.process, Path(), ProcessRank(), Path())


def compared(there: record.Recorded, precision: str = "fp32") -> record.RecordVerdict:
    """The verdict on what this machine computes now."""
    verdict = recorded(there, precision).verdict
    assert verdict is not None
    return verdict


class Fault(TorchDispatchMode):
    """Stands in for a faulty kernel: changes what one operator computes, forward and backward, drawn or trained."""

    def __init__(self, operator: Any, change: Callable[..., Any]) -> None:
        super().__init__()
        self._operator, self._change = operator, change

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not self._operator:
            return func(*args, **(kwargs or {}))
        return self._change(func, list(args), kwargs or {})


def argument(place: int, value: Any) -> Callable[..., Any]:
    """The operator with another argument, which may be a function of its own."""

    def call(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        args += [None] * (place + 1 - len(args))
        args[place] = value(args[place]) if callable(value) else value
        return func(*args, **kwargs)

    return call


def result(change: Callable[[Tensor], Tensor], place: int = 0) -> Callable[..., Any]:
    """The operator with another result."""

    def call(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        computed = func(*args, **kwargs)
        if isinstance(computed, Tensor):
            return computed.copy_(change(computed))
        return tuple(change(part) if at == place else part for at, part in enumerate(computed))

    return call


def tile(tensor: Tensor) -> Tensor:
    """One wrong tile: its last rows are doubled."""
    tensor = tensor.clone()
    tensor[-1:] *= 1.01
    return tensor


def half(tensor: Tensor) -> Tensor:
    """The rest that an accumulation in fp16 leaves."""
    return tensor.half().float()


def inputs_in_half(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    decimals = [half(part) if isinstance(part, Tensor) and part.is_floating_point() else part for part in args]
    return func(*decimals, **kwargs)


def stale(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    args[3], args[4] = args[3].clone(), args[4].clone()
    return func(*args, **kwargs)


FAULTS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "layer norm: epsilon": (aten.native_layer_norm.default, argument(4, 1e-3)),
    "layer norm: no bias": (aten.native_layer_norm.default, argument(3, torch.zeros_like)),
    "layer norm backward: a dropped term": (aten.native_layer_norm_backward.default, result(lambda t: t * 1.001)),
    "layer norm backward: bias": (aten.native_layer_norm_backward.default, result(tile, 2)),
    "batch norm: epsilon": (aten.native_batch_norm.default, argument(7, 1e-6)),
    "batch norm: stale statistics": (aten.native_batch_norm.default, stale),
    "batch norm: momentum": (aten.native_batch_norm.default, argument(6, 0.11)),
    "batch norm backward: fp16": (aten.native_batch_norm_backward.default, result(half)),
    "group norm: epsilon": (aten.native_group_norm.default, argument(7, 1e-3)),
    "convolution: one wrong tile": (aten.convolution.default, result(tile)),
    "convolution: fp16": (aten.convolution.default, inputs_in_half),
    "convolution backward: weights' tile": (aten.convolution_backward.default, result(tile, 1)),
    "convolution backward: fp16": (aten.convolution_backward.default, inputs_in_half),
    "product: fp16": (aten.addmm.default, inputs_in_half),
    "product: one wrong tile": (aten.addmm.default, result(tile)),
    "product: no bias": (aten.addmm.default, argument(0, torch.zeros_like)),
    "product backward: bf16": (aten.mm.default, result(lambda t: t.bfloat16().float())),
    "gelu: approximated": (aten.gelu.default, lambda func, args, kwargs: func(args[0], approximate="tanh")),
    "gelu backward: approximated": (aten.gelu_backward.default, lambda f, a, k: f(a[0], a[1], approximate="tanh")),
    "silu: fp16": (aten.silu.default, result(half)),
    "tanh: a short series": (aten.tanh.default, result(lambda t: t - 1e-4 * t**3)),
    "tanh backward: a dropped term": (aten.tanh_backward.default, lambda func, args, kwargs: args[0].clone()),
    "softmax: temperature": (aten._softmax.default, argument(0, lambda t: t * 1.0001)),
    "softmax backward: a dropped term": (aten._softmax_backward_data.default, lambda f, a, k: a[0] * a[1]),
    "log softmax: fp16": (aten._log_softmax.default, result(half)),
    "upsampling: another interpolation": (aten.upsample_bilinear2d.default, argument(2, True)),
    "average pooling: a wrong tile": (aten.avg_pool2d.default, result(tile)),
    "maximum backward: doubled": (aten.max_pool2d_with_indices_backward.default, result(lambda t: t * 1.001)),
    "embedding: another row": (aten.embedding.default, argument(1, lambda places: (places + 1).clamp(max=16))),
    "embedding backward: clamped": (aten.embedding_dense_backward.default, result(lambda t: t.clamp(-1e-3, 1e-3))),
    "Adam: epsilon": (aten.add_.Tensor, argument(1, lambda eps: 1e-4 if eps == 1e-8 else eps)),
    "Adam: momentum": (aten.lerp_.Scalar, argument(2, 0.11)),
}  # fmt: skip


@pytest.fixture(scope="module")
def there() -> record.Recorded:
    return recorded()


def test_the_same_machine_computes_the_same_bits(there: record.Recorded) -> None:
    verdict = compared(there)
    assert (verdict.verdict, verdict.because, verdict.largest) == ("same", "", 0.0)
    assert verdict.calls > 60 and verdict.results == len(there.results) > 100


@pytest.mark.slow
@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.soak)])
def test_planted_faults_are_named_with_their_operators(there: record.Recorded, every: int) -> None:
    wrong = []
    for name in list(FAULTS)[::every]:
        operator, change = FAULTS[name]
        with Fault(operator, change):
            verdict = compared(there)
        if verdict.verdict != "different" or not verdict.operator.startswith(operator.name().partition(".")[0]):
            wrong.append(f"{name}: {verdict.verdict}, {verdict.because}, {verdict.operator}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_the_program_shows_the_difference_of_the_smallest_call(there: record.Recorded, tmp_path: Path) -> None:
    operator, change = FAULTS["gelu: approximated"]
    with Fault(operator, change):
        verdict = compared(there)
    assert verdict.because.startswith("from step 1, the input of group, in forward"), verdict.because
    (tmp_path / "show.py").write_text(verdict.script)
    shown = subprocess.run([sys.executable, tmp_path / "show.py"], capture_output=True, text=True, check=True).stdout
    assert float(shown.split()[-1]) < 1e-6, "this machine's kernel is the record's"


def test_another_precision_is_named_and_hides_no_fault(there: record.Recorded) -> None:
    verdict = compared(there, "bf16")
    assert (verdict.verdict, verdict.because, verdict.operator) == ("same but for", "the precision", "")
    assert verdict.largest > 1e-3, "bf16 rounds to 8 bits"
    operator, change = FAULTS["Adam: momentum"]
    with Fault(operator, change):
        verdict = compared(there, "bf16")
    assert verdict.verdict == "different" and verdict.operator.startswith("aten::lerp_"), verdict


def test_settings_that_lower_the_precision_explain_small_differences_alone(there: record.Recorded, monkeypatch) -> None:
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    operator, change = FAULTS["product: fp16"]  # as TF32: 10 bits of mantissa
    torch.set_float32_matmul_precision("medium")  # torch then refuses to tell it
    try:
        with Fault(operator, change):
            verdict = compared(there)
        with Fault(operator, argument(0, torch.zeros_like)):
            wrong = compared(there)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert (verdict.verdict, verdict.because) == ("same but for", "the precision")
    [change] = verdict.machines
    assert change.startswith("arithmetic: ") and '"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"' in change
    assert wrong.verdict == "different" and wrong.operator.startswith("aten::addmm")


def test_what_is_beyond_five_megabytes_is_left_out(there: record.Recorded, tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "a.record"
    record.write(there, file)
    whole, results = file.stat().st_size, len(there.results)
    for share, steps, fewest, most in ((0.9, 1, 0.5, 0.5), (0.75, 1, 0.1, 0.3)):
        monkeypatch.setattr(record, "MOST_BYTES", int(whole * share))
        assert record.write(there, file) == (steps, len(record.read(file).results))
        assert file.stat().st_size <= whole * share
        assert fewest <= len(record.read(file).results) / results <= most
        assert compared(record.read(file)).verdict == "same"


def test_a_record_is_a_small_file_of_numbers_and_nothing_else_is_read(there: record.Recorded, tmp_path: Path) -> None:
    file = tmp_path / "a.record"
    assert record.write(there, file) == (2, len(there.results))
    assert file.stat().st_size < record.MOST_BYTES
    assert there.header.task == "mixed.py", "the folder is this machine's business"
    again = record.read(file)
    assert again.header == there.header and np.array_equal(again.results, there.results)
    for content in (b"", b"\x80\x04.", file.read_bytes()[:200]):
        file.write_bytes(content)
        with pytest.raises(UsageError, match="is no record of grappe verify --record"):
            record.read(file)


def test_frozen_units_and_masks_have_noise_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    results = [record._Results(model, CallLog(), seed) for seed in (None, 0)]
    with torch.no_grad():
        model(torch.ones(2, 4))
    plain, other = (numbers.sketches["0|forward|1|0"] for numbers in results)
    assert 1e-8 < float(gaps(plain, other)) < 1e-5
    mask = torch.tensor([-torch.inf, 0.0, 1.0])
    assert moved(mask, 1).tolist()[:2] == [-torch.inf, 0.0]


def test_sketches_estimate_the_distance_of_tensors() -> None:
    numbers = torch.randn(3, 50_000, generator=torch.Generator().manual_seed(0))
    other = numbers.clone()
    other[1, 500:600] += 0.01
    away = float((numbers - other).norm() / numbers.norm())
    assert float(gaps(sketch([numbers]), sketch([other]))) == pytest.approx(away, rel=1.0)
    assert 0 < float(gaps(sketch([numbers]), sketch([moved(numbers, 1)]))) < 1e-6
    lost = numbers.clone()
    lost[0, 0] = torch.nan
    assert float(gaps(sketch([numbers]), sketch([lost]))) == float("inf")
    assert float(gaps(sketch([lost]), sketch([lost]))) == 0
