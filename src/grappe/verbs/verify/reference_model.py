"""Reference model: a model, its optimizer and schedule, trained by hand without an engine."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from grappe.checkpoint.weights import Weights, named_tensors
from grappe.data.draw import mix
from grappe.data.loader import in_channels_last
from grappe.data.order import cut
from grappe.data.rand_like import inside
from grappe.errors import DivergedError
from grappe.optimizers.modes import begin_training
from grappe.parallel.batchnorm import kept_buffers, replace_buffers
from grappe.plan import Plan
from grappe.private_api.torch import module_parameters, tree_map
from grappe.step.loss import LossValues, loss_of
from grappe.step.precision import autocast
from grappe.step.task_contract import optimizer_of, schedule_of
from grappe.task import Task
from grappe.verbs.verify.reference_batches import Batch, Rows


class ReferenceModel:
    """Trains a model by hand; each further data slice has a model of its own, with the same parameters.

    Args:
        plan: gives the precision, and whether each piece has a random stream of its own.
        channels_last: whether images are laid out channels last, to change only the rounding.
    """

    def __init__(
        self,
        task: Task,
        plan: Plan,
        weights: Weights,
        device: torch.device,
        *,
        slices: int,
        total: int,
        channels_last: bool = False,
    ) -> None:
        self._task, self._exact, self._device = task, bool(plan.exact), device
        self._channels_last = channels_last
        self.model = task.model().to(device).train()
        if channels_last:
            self.model.to(memory_format=torch.channels_last)  # pyrefly: ignore
        with torch.no_grad():
            for name, tensor in named_tensors(self.model).items():
                tensor.copy_(weights.read(name))
        self._models = [self.model, *(_with_own_buffers(self.model) for _ in range(slices - 1))]
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self._parameters = [parameter for _, parameter in named]
        self._optimizer = optimizer_of(task, named)
        begin_training(self._optimizer)
        self._schedule = schedule_of(task, self._optimizer, total)
        self._autocast = autocast(plan.precision, device)

    def step(self, number: int, batch: Batch, parts: int = 1, sums: int = 1) -> tuple[float, float]:
        """Takes a step; returns the loss, and the gradient's norm before clipping.

        Args:
            parts: the number of parts in which the rows run through the model, to change only the rounding.
            sums: the number of partial sums of the losses, each with its own backward, to change only the rounding.
        """
        self._optimizer.zero_grad()
        total = torch.zeros((), device=self._device)
        for index, (model, pieces) in enumerate(zip(self._models, batch.slices, strict=True)):
            self._seed(number, index)
            for rows in pieces:
                if self._exact:
                    self._seed(number, rows.piece)
                with self._autocast, inside(rows.sample_ids):
                    output = (
                        self._in_parts(model, rows, parts) if parts > 1 else self._call(model, rows.inputs)
                    )
                    found = loss_of(self._task, output, rows.targets)
                    counts = self._task.counts(rows.targets)
                weighted = _weighted(found, counts, len(rows.ids), batch)
                for part in weighted.tensor_split(sums):
                    one = part.sum() / batch.count
                    one.backward(retain_graph=sums > 1)
                    total += one.detach()
        norm = self._clip()
        if not math.isfinite(float(total)):
            raise DivergedError(
                f"the loss is {float(total)} on one plain process, in step {number + 1} (sample ids "
                f"{_ids(batch)}): nothing can be compared. Try a lower lr, clip=1, or look at those samples"
            )
        self._optimizer.step()
        if self._schedule is not None:
            self._schedule.step()
        return float(total), norm

    def _call(self, model: nn.Module, inputs: Any) -> Any:
        return self._task.forward(model, in_channels_last(inputs) if self._channels_last else inputs)

    def _in_parts(self, model: nn.Module, rows: Rows, parts: int) -> Any:
        """Computes the model's output of all rows in parts; sets its buffers to those after all rows at once."""
        before = kept_buffers(model)
        with torch.no_grad():
            whole = self._call(model, rows.inputs)
        after = kept_buffers(model)
        outputs = []
        for first, last in (cut(len(rows.ids), parts, part) for part in range(parts)):
            if last > first:
                replace_buffers(before)
                with inside(rows.sample_ids._replace(ids=rows.ids[first:last])):
                    outputs.append(self._call(model, rows.part(first, last)))
        replace_buffers(after)
        return tree_map(_together, whole, *outputs)

    def _seed(self, number: int, part: int) -> None:
        torch.manual_seed(mix(self._task.seed, number, part))

    def _clip(self) -> float:
        # In float64: torch's float32 norm of 20 million numbers is wrong by a thousandth.
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm = math.sqrt(sum(float(one.double().square().sum()) for one in gradients))
        assert self._task.clip is not None, "a watched task has a bound"
        if norm > self._task.clip:
            for gradient in gradients:
                gradient.mul_(self._task.clip / (norm + 1e-6))
        return norm

    def weights(self) -> dict[str, Tensor]:
        """Returns parameters, and the mean of the slices' buffers, on the CPU."""
        weights = {name: one.detach().cpu().clone() for name, one in self.model.named_parameters()}
        for name, buffer in self.model.named_buffers():
            alike = [dict(model.named_buffers())[name].cpu() for model in self._models]
            weights[name] = torch.stack(alike).mean(0) if buffer.is_floating_point() else alike[0].clone()
        return weights


def _weighted(found: LossValues, counts: Any, rows: int, batch: Batch) -> Tensor:
    """Returns a piece's values, so weighted that those of the whole batch sum to its mean loss times its count."""
    if isinstance(counts, Mapping):
        # A loss in which nothing counts adds nothing.
        factors = {name: batch.count / one if one else 0.0 for name, one in batch.counts.items()}
        return torch.cat(
            [(found.named[name] * one * factors[name]).flatten() for name, one in counts.items()]
        )
    if counts is not None:
        return found.values * counts
    return found.values * (rows / found.values.numel())


def _ids(batch: Batch) -> str:
    ids = [int(one) for pieces in batch.slices for rows in pieces for one in rows.ids]
    return ", ".join(map(str, ids[:16])) + (", …" if len(ids) > 16 else "")


def _together(whole: Any, *parts: Any) -> Any:
    """A leaf of the parts' outputs, like that of `whole`: rows after rows, or what has none, as it is."""
    if isinstance(whole, Tensor) and whole.dim() and parts[0].shape != whole.shape:
        rows = whole.split([len(part) for part in parts])
        return torch.cat([_padded(part, like) for part, like in zip(parts, rows, strict=True)])
    return parts[0]


def _padded(part: Tensor, like: Tensor) -> Tensor:
    """A part that is padded to its own longest sequence, padded as `like` is."""
    if part.shape == like.shape:
        return part
    padded = like.clone()
    padded[tuple(map(slice, part.shape))] = part
    return padded


def _with_own_buffers(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    modules = dict(other.named_modules())
    for name, module in model.named_modules():
        module_parameters(modules[name]).update(module_parameters(module))
    return other
