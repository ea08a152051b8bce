"""Trains on one plain process, in a hand-written loop that shares no code with engines or loaders.

This reference shares with a training the initial weights, the order of the samples and the keys of their
randomness. It also runs the same steps with each batch's rows in other orders: their drift is the difference that
rounding explains.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from grappe.checkpoint.initial import built
from grappe.checkpoint.weights import Weights, named_tensors
from grappe.data.arrays import in_memory
from grappe.data.draw import mix
from grappe.data.loader import in_channels_last
from grappe.data.order import cut
from grappe.data.prepare import prepare
from grappe.data.rand_like import inside
from grappe.data.seeded import SeededDataset
from grappe.errors import DivergedError
from grappe.errors.user_code import naming_user_line
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World, join
from grappe.optimizers.modes import begin_training
from grappe.parallel.batchnorm import kept_buffers, replace_buffers
from grappe.plan import Plan
from grappe.private_api.torch import module_parameters, tree_map
from grappe.step.loss import LossValues, loss_of
from grappe.step.precision import autocast
from grappe.step.task_contract import optimizer_of, schedule_of
from grappe.task import Task, overrides
from grappe.verbs.verify.batch_coupling import Companions, batch_coupled_modules
from grappe.verbs.verify.hand_batches import RecordedBatch, ReferenceBatch, ReferenceBatches, Reorder, Rows
from grappe.verbs.verify.instrument import NO_CLIP, NOTHING, Instrumentation, SampleRecorder, instrumented
from grappe.verbs.verify.random_ops import RandomOps


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

    def step(self, number: int, batch: ReferenceBatch, parts: int = 1, sums: int = 1) -> tuple[float, float]:
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
                    losses = loss_of(self._task, output, rows.targets)
                    counts = self._task.counts(rows.targets)
                weighted = _weighted(losses, counts, len(rows.ids), batch)
                for part in weighted.tensor_split(sums):
                    share = part.sum() / batch.count
                    share.backward(retain_graph=sums > 1)
                    total += share.detach()
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
            full = self._call(model, rows.inputs)
        after = kept_buffers(model)
        outputs = []
        for first, last in (cut(len(rows.ids), parts, part) for part in range(parts)):
            if last > first:
                replace_buffers(before)
                with inside(rows.sample_ids._replace(ids=rows.ids[first:last])):
                    outputs.append(self._call(model, rows.part(first, last)))
        replace_buffers(after)
        return tree_map(_together, full, *outputs)

    def _seed(self, number: int, part: int) -> None:
        torch.manual_seed(mix(self._task.seed, number, part))

    def _clip(self) -> float:
        # In float64: torch's float32 norm of 20 million numbers is wrong by a thousandth.
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        assert self._task.clip is not None, "a watched task has a bound"
        if norm > self._task.clip:
            for gradient in gradients:
                gradient.mul_(self._task.clip / (norm + 1e-6))
        return norm

    def weights(self) -> dict[str, Tensor]:
        """Returns parameters, and the mean of the slices' buffers, on the CPU."""
        weights = {
            name: parameter.detach().cpu().clone() for name, parameter in self.model.named_parameters()
        }
        for name, buffer in self.model.named_buffers():
            alike = [dict(model.named_buffers())[name].cpu() for model in self._models]
            weights[name] = torch.stack(alike).mean(0) if buffer.is_floating_point() else alike[0].clone()
        return weights


def _weighted(losses: LossValues, counts: Any, rows: int, batch: ReferenceBatch) -> Tensor:
    """Returns a piece's values, so weighted that those of the whole batch sum to its mean loss times its count."""
    if isinstance(counts, Mapping):
        # A loss in which nothing counts adds nothing.
        factors = {name: batch.count / count if count else 0.0 for name, count in batch.counts.items()}
        return torch.cat(
            [(losses.named[name] * count * factors[name]).flatten() for name, count in counts.items()]
        )
    if counts is not None:
        return losses.values * counts
    return losses.values * (rows / losses.values.numel())


def _ids(batch: ReferenceBatch) -> str:
    ids = [int(sample) for pieces in batch.slices for rows in pieces for sample in rows.ids]
    return ", ".join(map(str, ids[:16])) + (", …" if len(ids) > 16 else "")


def _together(full: Any, *parts: Any) -> Any:
    """A leaf of the parts' outputs, like that of `whole`: rows after rows, or what has none, as it is."""
    if isinstance(full, Tensor) and full.dim() and parts[0].shape != full.shape:
        rows = full.split([len(part) for part in parts])
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


class RoundingTrial:
    """The same training with the rows of each batch in other orders, and without random draws, which belong to rows.

    Rows move in pairs, since a task may mix pairs. If the model does not couple rows, they run through it in
    parts, else the gradients of partial sums of losses are added: some differences (of a bias whose gradient is
    only rounding, which Adam divides by its own size) appear only then. The loss gets all rows at once.

    Args:
        channels_last: whether the plan lays images out channels last, whose kernels add up in an order of their own.
        perturbed: whether to train further models too, whose initial parameters are moved by as much as a float32 is
            rounded. Another order reaches few of the places where rounding decides: a ReLU's input that is nearly 0.
    """

    def __init__(
        self,
        new_model: Callable[..., ReferenceModel],
        drawing: bool,
        independent_rows: bool,
        *,
        channels_last: bool,
        perturbed: bool,
    ) -> None:
        self._base = new_model() if drawing else None
        self._independent_rows = independent_rows
        self._others = [(order, new_model()) for order in ORDERS]
        if channels_last:
            self._others.append((AS_IT_IS, new_model(channels_last=True)))
        if perturbed:
            self._others += [(AS_IT_IS, _perturbed(new_model(), seed)) for seed in range(PERTURBED)]

    def step(
        self, number: int, batch: ReferenceBatch, model: ReferenceModel, result: tuple[float, float]
    ) -> tuple[float, float, dict[str, float]]:
        """Computes the largest relative differences of loss, norm and each tensor, over the orders."""
        loss_noise = norm_noise = 0.0
        noise: dict[str, float] = {}
        with RandomOps(off=True):
            if self._base is not None:
                result = self._base.step(number, batch)
            base = (self._base or model).weights()
            for order, other in self._others:
                cut = {"parts": order.parts} if self._independent_rows else {"sums": order.sums}
                loss, norm = other.step(number, batch.reordered(order.reorder), **cut)
                loss_noise = max(loss_noise, relative(result[0], loss))
                norm_noise = max(norm_noise, relative(result[1], norm))
                for name, tensor in other.weights().items():
                    noise[name] = max(noise.get(name, 0.0), gap(base[name], tensor))
        return loss_noise, norm_noise, noise


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SummationOrder:
    """The order of summation in one of the other models."""

    reorder: Reorder
    parts: int
    sums: int


ORDERS = (
    _SummationOrder(reorder=lambda pairs: pairs[::-1], parts=2, sums=2),
    _SummationOrder(
        reorder=lambda pairs: pairs[len(pairs) // 2 :] + pairs[: len(pairs) // 2], parts=8, sums=3
    ),
)

PERTURBED = 4
"""Models with perturbed parameters."""
AS_IT_IS = _SummationOrder(reorder=lambda pairs: pairs, parts=1, sums=1)


@torch.no_grad()
def _perturbed(model: ReferenceModel, seed: int) -> ReferenceModel:
    """Moves each parameter at random by about its last bit."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.model.parameters():
        draws = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.mul_(1 + torch.finfo(torch.float32).eps * draws)
    return model


def relative(a: float, b: float) -> float:
    """Computes |a - b| / |a|; infinity if exactly one is not a number."""
    if math.isfinite(a) and math.isfinite(b):
        return abs(a - b) / (abs(a) or 1.0)
    return 0.0 if repr(a) == repr(b) else math.inf


def gap(a: Tensor, b: Tensor) -> float:
    """Computes |a - b| / |a| in norms."""
    a, b = a.double(), b.double()
    return 0.0 if torch.equal(a, b) else float((a - b).norm() / (a.norm() or 1.0))


ONE_PROCESS = Plan()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceRequest:
    """The input of the plain process."""

    task: Any
    """A TaskReference."""
    data: Path
    steps: int
    folder: Path
    """The folder for the weights after each step."""
    instrumentation: Instrumentation = NOTHING
    plan: Plan = ONE_PROCESS
    """The device, threads and precision."""
    slices: int = 1
    """Number of data slices of each batch, run one after the other, each with its own buffers and random streams."""
    pieces: int = 1
    """Number of microbatches of each slice."""
    recorded: tuple[RecordedBatch, ...] = ()
    perturbed: bool = False
    """Whether the noise is also that of parameters which are moved by their last bit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceStep:
    """One step of the plain process, and the difference that other orders of summation make."""

    ids: tuple[int, ...]
    loss: float
    norm: float
    loss_noise: float
    norm_noise: float
    noise: dict[str, float]
    """By tensor, |a - b| / |a| in norms."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """The result of the plain process."""

    folder: Path
    steps: tuple[ReferenceStep, ...]
    per_epoch: int
    length: int
    draws: tuple[str, ...]
    """Operators of the model that draw random numbers."""
    coupled: dict[str, str]
    """Modules that couple a batch's samples, by name: their classes."""
    companions: tuple[Companions, ...]
    """Fixed samples for modules that couple samples in evaluation too, to accompany each row."""
    buffers: tuple[str, ...]
    augments: bool
    clips: bool
    whole_batch: bool
    """The task's `whole_batch_loss`: rows must not be separated."""


def worker(request: ReferenceRequest, process: ProcessRank, rendezvous_folder: Path) -> Reference:
    """Trains on the plain process, and returns what it recorded."""
    world = join(Plan(device=request.plan.device, threads=request.plan.threads), process, rendezvous_folder)
    plain = request.task.resolve()
    with naming_user_line(plain):
        return _trained(plain, request, world)


def _trained(plain: Task, request: ReferenceRequest, world: World) -> Reference:
    prepare(plain, request.data)  # here, before all other processes
    task = instrumented(plain, request.instrumentation, SampleRecorder())
    batches = ReferenceBatches(
        task,
        request.data,
        world.device,
        steps=request.steps,
        slices=request.slices,
        pieces=request.pieces,
        recorded=request.recorded,
    )
    weights = built(task)
    probe = _probe(task, batches, world.device, request.instrumentation.without_randomness)

    def new_model(*, channels_last: bool = False) -> ReferenceModel:
        return ReferenceModel(
            task, request.plan, weights, world.device, slices=request.slices, total=batches.total,
            channels_last=channels_last,
        )  # fmt: skip

    model = new_model()
    rounding_trial = None
    if not request.recorded:
        rounding_trial = RoundingTrial(
            new_model,
            bool(probe.draws),
            probe.independent_rows,
            channels_last=request.plan.channels_last,
            perturbed=request.perturbed,
        )
    steps = []
    for number in range(request.steps):
        batch = batches.batch(number)
        with RandomOps(off=True) if request.instrumentation.without_randomness else contextlib.nullcontext():
            loss, norm = model.step(number, batch)
        save_file(model.weights(), request.folder / f"step-{number:03d}.safetensors")
        noise = rounding_trial.step(number, batch, model, (loss, norm)) if rounding_trial else (0.0, 0.0, {})
        steps.append(
            ReferenceStep(
                ids=tuple(int(i) % batches.stored for pieces in batch.slices for rows in pieces for i in rows.ids),
                loss=loss, norm=norm, loss_noise=noise[0], norm_noise=noise[1], noise=noise[2],
            )
        )  # fmt: skip
    return Reference(
        folder=request.folder,
        steps=tuple(steps),
        per_epoch=batches.per_epoch,
        length=batches.length,
        draws=probe.draws,
        coupled=probe.coupled,
        companions=probe.companions,
        buffers=tuple(name for name, _ in model.model.named_buffers()),
        augments=overrides(task, "augment"),
        clips=task.clip != NO_CLIP,
        whole_batch=task.whole_batch_loss,
    )


def load(request: ReferenceRequest, process: ProcessRank, rendezvous_folder: Path) -> tuple[Any, ...]:
    """Loads a trial's samples, each once."""
    task = instrumented(request.task.resolve(), request.instrumentation, SampleRecorder())
    dataset: Any = task.data("train", request.data)
    samples = SeededDataset(dataset, seed=task.seed).__getitems__([(0, i) for i in range(len(dataset))])
    if in_memory(dataset) is not None:  # the ids are with the targets
        return tuple((inputs, target) for inputs, (target, _) in samples)
    return tuple(sample for sample, _ in samples)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Probe:
    """The result of one forward of the model."""

    draws: tuple[str, ...]
    coupled: dict[str, str]
    companions: tuple[Companions, ...]
    independent_rows: bool


def _probe(task: Task, batches: ReferenceBatches, device: torch.device, off: bool) -> _Probe:
    """Finds modules that couple a batch's samples, and operators that draw, in one forward of a separate model."""
    torch.manual_seed(task.seed)
    model = task.model().to(device).train()
    rows = batches.batch(0).slices[0][0]
    with RandomOps(off=off) as random_ops, torch.no_grad(), inside(rows.sample_ids):
        task.forward(model, rows.inputs)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    coupling = batch_coupled_modules(model, task.forward, rows.part, len(rows.ids))
    return _Probe(
        draws=tuple(sorted(random_ops.seen)),
        coupled={name: kinds[name] for name in coupling.modules},
        companions=tuple(companions for companions in coupling.modules.values() if companions is not None),
        independent_rows=coupling.independent_rows and rows.cuttable,
    )
