"""Tokens/s of grappe and of a loop written by hand, as shares of the device's peaks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch

from benchmarks.gpu.pace import Window, give_memory_back, seconds_a_step
from benchmarks.gpu.part import Aim, Part
from benchmarks.gpu.tasks import LanguageTask
from grappe.contrib.doctor.on_device import DeviceTrial
from grappe.foresight.devices import device_reported
from grappe.plan import Plan
from grappe.verbs.measure.flops import reachable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peaks:
    """FLOP/s in bf16 of a large matrix product, measured, and of the data sheet; None: there is none here."""

    measured: float
    data_sheet: float | None


def peaks(part: Part) -> Peaks:
    """Measures the device's peak as `grappe doctor --passport` does, and reports it."""
    device = torch.device(part.device)
    flops = reachable(device, Plan(precision="bf16"))
    sheet = device_reported(torch.cuda.get_device_name(device)) if part.on_gpu else None
    peak = sheet.flops("bf16") if sheet is not None and "bf16" in sheet.tflops else None
    text = f"{flops / 1e12:.3g} TFLOP/s" + (f", {flops / peak:.0%} of the data sheet's" if peak else "")
    figures = {"flops": flops} | ({"peak": peak} if peak else {})
    part.trial(DeviceTrial(what="bf16 matrix product", right=None, text=text, figures=figures))
    return Peaks(measured=flops, data_sheet=peak)


def compare(
    part: Part, name: str, task: LanguageTask, plans: Sequence[str], aim: float, *, warmup: int, steps: int
) -> None:
    """Reports tokens/s under each plan beside the same loop by hand, compiled where the plan is.

    Args:
        aim: share of the data sheet's peak; of the CPU, nothing is aimed at.
    """
    peak, by_hand = peaks(part), dict[bool, float]()
    tokens, flops = task.batch_size * task.context, task.flops_per_token()
    for plan in plans:
        compiled = Plan.parse(plan).compile
        if compiled not in by_hand:
            by_hand[compiled] = tokens / _by_hand(part, task, compiled, warmup, steps)
        rate = tokens / seconds_a_step(part, task, plan, f"{name}-{plan}".replace(" ", "-"), warmup, steps)
        ratio, share = rate / by_hand[compiled], rate * flops / (peak.data_sheet or peak.measured)
        shares = [f"{ratio:.3f} of by hand", f"{rate * flops / peak.measured:.1%} of the measured peak"]
        if peak.data_sheet:
            shares.append(f"{share:.1%} of the data sheet's")
        judged = peak.data_sheet is not None or not part.on_gpu
        part.measured(
            f"{name}, {plan}",
            ", ".join([f"{rate:,.0f} tokens/s", *shares]),
            aim=Aim(figure=aim, form="{:.0%} of the data sheet's peak") if judged else None,
            found=share,
            tokens_per_second=rate,
            ratio_to_by_hand=ratio,
        )


def _by_hand(part: Part, task: LanguageTask, compiled: bool, warmup: int, steps: int) -> float:
    """Returns the seconds a step of the same model in a plain loop."""
    device, window = torch.device(part.device), Window(part, warmup, steps)
    torch.manual_seed(0)
    with device:
        model = task.model()
    optimizer = task.optimizer(list(model.named_parameters()))
    forward = torch.compile(model) if compiled else model
    data = task.data("train", part.scratch)
    inputs, targets = (torch.as_tensor(one).to(device) for one in (data.inputs, data.targets))
    with _one_thread():
        for step in range(window.last):
            first = step * task.batch_size % (task.samples - task.batch_size + 1)
            rows = slice(first, first + task.batch_size)
            with torch.autocast(part.device, torch.bfloat16):
                loss = task.loss(forward(inputs[rows]), targets[rows]).mean()
            loss.backward()
            if task.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            window.tick()
    del model, optimizer, forward, loss, inputs, targets
    if compiled:
        torch.compiler.reset()
    give_memory_back()
    return window.seconds


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Context with one thread of the CPU, as the plan of the other contender has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
