"""Runs microbatches on any engine: forward, loss and backward in training, forward alone in evaluation."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from grappe.data.batch import Batch, InModel, Microbatch, entering, with_rows
from grappe.data.collate import at_rows
from grappe.data.whole_batch_draws import OWN_DRAWS, SAME_DRAWS, torchs_generator, whole_batch_draws
from grappe.engines.base import EngineSetup
from grappe.engines.shared.carried import nothing_changed
from grappe.engines.shared.watched_forward import WatchedForward, parameters_kept
from grappe.parallel.batchnorm import buffers_agreed, buffers_restored, ignoring_padding
from grappe.parallel.compile import replaying
from grappe.parallel.materialise import refuse_hooks
from grappe.parallel.shard import reshard
from grappe.plan import Plan
from grappe.private_api.torch import tree_leaves
from grappe.profiling import memory
from grappe.profiling.phases import FORWARD
from grappe.step.fast_paths import seed_dropout
from grappe.step.loss import NO_ROOTS, RELATIVE, ROUNDING, Loss, LossReduction, Roots, Sums
from grappe.step.precision import LossScale, autocast
from grappe.step.scores import Scorer, Scores, make_losses
from grappe.step.whole_batch_loss import AnyLosses, WholeBatchLosses

_NOTHING: Any = contextlib.nullcontext()
COMPARED_ROWS = 8
"""Samples whose outputs are compared with those in a batch of their own."""
NOT_SCALED = LossScale("fp32")


class MicrobatchRunner:
    """Runs the microbatches of a step: seeds dropout, runs forward and loss, adds up the loss, starts its reduction.

    Args:
        model: the model, whose batch normalisation ignores rows of padding.
        forward: the function that is called with a microbatch's inputs, in the plan's precision.
        first_forward: the function that is called in a first pass, if it is another one.
        gradient_divisor: the number by which the gradients are divided afterwards.
        precision: the context in which the loss is computed.
        reduction: sums the loss over the processes; None: the engine does that itself.
    """

    def __init__(
        self,
        setup: EngineSetup,
        model: nn.Module,
        forward: Callable[[Any], Any],
        *,
        loss_scale: LossScale = NOT_SCALED,
        gradient_divisor: float = 1.0,
        precision: contextlib.AbstractContextManager[Any] = _NOTHING,
        reduction: LossReduction | None = None,
        first_forward: Callable[[Any], Any] | None = None,
    ) -> None:
        OWN_DRAWS.clear()  # of a training before in this process
        SAME_DRAWS.clear()
        refuse_hooks(model, setup.plan)
        self._setup, self._model, self._forward, self._carried = setup, model, forward, setup.carried
        self._first_forward = first_forward or forward
        self.watch = WatchedForward(setup, model)
        self._loss_scale, self._gradient_divisor, self._precision = loss_scale, gradient_divisor, precision
        self._on_phase, self._stop = setup.observers.phase, setup.stop
        self.losses = make_losses(setup.task, setup.plan, setup.world, setup.observers)
        self._whole_batch = setup.task.whole_batch_loss
        self.reduction = reduction
        self.total: Tensor | None = None
        """The sum of the losses of the step's microbatches so far, a float32 scalar."""

    @property
    def scale(self) -> float:
        """Returns the factor of the output gradient."""
        return self._gradient_divisor * self._loss_scale.value

    def begin(self, batch: Batch) -> None:
        """Begins a step: seeds dropout, and runs the first pass where the loss needs one. Collective."""
        seed_slice(self._setup, batch)
        self.total = None
        if self._whole_batch:
            self.first_pass(batch, lambda _, micro: self._first_output(batch, micro))

    def _first_output(self, batch: Batch, micro: Microbatch) -> Any:
        with draws(self._setup, batch, micro):
            return self._first_forward(entering(micro))

    def first_pass(self, batch: Batch, forward: Callable[[int, Microbatch], Any]) -> None:
        """Runs the first pass, if the loss compares samples of the whole batch. Collective."""
        if self._whole_batch:
            first_pass(
                self.losses, self._setup, self._model, batch, forward, scale=self.scale, precision=self._precision
            )

    def run(self, batch: Batch, micro: Microbatch, backward: Callable[[Loss, Roots], None]) -> None:
        """Runs forward, loss and `backward`, which adds the microbatch's gradient to the parameters' gradients."""
        with self.padding_ignored(micro), draws(self._setup, batch, micro):
            backward(*self.loss(batch, micro))

    def padding_ignored(self, micro: Microbatch) -> contextlib.AbstractContextManager[None]:
        """Context of a microbatch; of its backward too, where activation checkpointing runs the forward again."""
        return _NOTHING if micro.rows else ignoring_padding(self._model)

    def loss(self, batch: Batch, micro: Microbatch) -> tuple[Loss, Roots]:
        """Runs forward and loss; returns the loss, and further roots of the step's last backward, which sum it up."""
        self._on_phase(FORWARD)
        return self.loss_of(self.output(self._forward, micro), batch, micro)

    def output(self, forward: Callable[[Any], Any], micro: Microbatch) -> Any:
        """Calls `forward` with the inputs of a microbatch; the training's first one is watched."""
        if not self.watch.over:
            return self.watch(forward, micro)
        # As entering(micro), without a call.
        InModel.samples, InModel.place = micro.sample_ids, micro.place
        self._carried.rows = micro.rows + micro.padding
        return forward(micro.inputs)

    def loss_of(self, output: Any, batch: Batch, micro: Microbatch) -> tuple[Loss, Roots]:
        """Computes the loss of a microbatch's output; after the step's last one starts the reduction of the sum."""
        with self._precision:
            loss = self.losses(output, micro, batch, self.scale)
        self.total = loss.total if self.total is None else self.total + loss.total
        if self.reduction is None or micro is not batch.microbatches[-1]:
            return loss, NO_ROOTS
        return loss, self.reduction.start(self.total, self._stop.flag, loss.values)

    def sums(self) -> Sums:
        """Returns the step's sums over all processes, after the step's last backward has been called."""
        assert self.reduction is not None
        return self.reduction.sums()

    def dry_run(self, batch: Batch, forward: Callable[[Any], Any], reduction: LossReduction) -> None:
        """Runs a forward and backward of the first microbatch that changes only gradients. Collective."""
        micro = batch.microbatches[0]
        with buffers_restored(self._model), self.watch.undone():
            output = self.output(forward, micro)
            with self._precision:
                loss = self.losses.dry_run(output, micro, batch)
            del output  # no step keeps it in backward
            roots, gradients = reduction.start(reduction.zero, 0.0, loss.values)
            torch.autograd.backward((loss.values, *roots), (loss.output_gradient, *gradients))
            reduction.sums()


def seed_slice(setup: EngineSetup, batch: Batch) -> None:
    """Seeds dropout for a step's microbatches one after the other, unless each draws for the whole batch."""
    if not setup.plan.draws_whole_batches:
        seed_dropout(setup.task.seed, batch.step, setup.world.device, setup.world.data_rank)


def draws(setup: EngineSetup, batch: Batch, micro: Microbatch) -> contextlib.AbstractContextManager[None]:
    """Context of a microbatch's forward, loss and backward: dropout is that of one process, if the plan has it so."""
    if not setup.plan.draws_whole_batches:
        return _NOTHING
    # Each microbatch begins where one process begins, and so draws the same numbers as all others.
    seed_dropout(setup.task.seed, batch.step, setup.world.device, 0)
    return whole_batch_draws(micro.place)


def remarks_on_draws(plan: Plan, device: torch.device) -> list[str]:
    """Returns a remark if random numbers of this process's training were not those of one process, unasked."""
    generator = torchs_generator(device)
    unused = torch.Generator(device).manual_seed(generator.initial_seed()).get_state()
    if plan.draws_whole_batches:
        ways = {
            "without a row for each sample, so each part of a batch has its own": OWN_DRAWS,
            "in a kernel of its own, the same in each microbatch: dropout=local gives each others": SAME_DRAWS,
        }
        return [
            f"no fault, though not one process's random numbers: {', '.join(sorted(names))} drew some {way}"
            for way, names in ways.items()
            if names
        ]
    alone = plan.data_parallel * plan.microbatches * plan.pipeline * plan.tensor == 1
    if plan.dropout == "local" or plan.exact or alone:
        return []
    if torch.equal(unused, generator.get_state()):
        return []
    instead = ", since the plan has compile" if plan.compile else ": dropout=whole makes it so, and takes longer"
    return [f"dropout or noise that is not that of one process{instead}"]


def within(precision: contextlib.AbstractContextManager[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, called inside `precision`."""
    if isinstance(precision, contextlib.nullcontext):
        return function

    def call(*arguments: Any) -> Any:
        with precision:
            return function(*arguments)

    return call


def _parameters_kept(setup: EngineSetup, model: nn.Module) -> contextlib.AbstractContextManager[None]:
    return parameters_kept(setup.carried.model or model, setup.carried.written)


@torch.no_grad()
def first_pass(
    losses: AnyLosses,
    setup: EngineSetup,
    model: nn.Module,
    batch: Batch,
    forward: Callable[[int, Microbatch], Any],
    *,
    scale: float = 1.0,
    precision: contextlib.AbstractContextManager[Any] | None = None,
) -> None:
    """Runs forward of all microbatches without gradients, if the loss needs their outputs. Collective.

    No buffer and no generator changes.

    Args:
        forward: called with each microbatch's number and the microbatch, in the order of the pass that follows, so that
            dropout draws the same.
        scale: factor of the output gradient, as in the pass that follows.
        precision: context of the loss.
    """
    if not isinstance(losses, WholeBatchLosses) or not losses.look_ahead_needed(batch):
        return
    outputs = []
    with nothing_changed(model, setup.world.device), _parameters_kept(setup, model):
        for number, micro in enumerate(batch.microbatches):
            with _NOTHING if micro.rows else ignoring_padding(model):
                outputs.append(forward(number, micro))
        with precision or _NOTHING:
            losses.look_ahead(batch, outputs, scale)
    if setup.plan.uses_fsdp:
        reshard(model)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    setup: EngineSetup,
    batches: Iterator[Batch],
    samples: int,
    forward: Callable[[Any], Any] | None = None,
) -> Scores:
    """Computes the scores over all data slices; the model is in training mode again afterwards. Collective.

    Args:
        forward: the function that is called with the inputs, if it is not the model itself.
    """
    plan, world = setup.plan, setup.world
    setup.carried.refuse_resized()
    scorer = Scorer(setup.task, plan, world)
    forward = forward or functools.partial(setup.task.forward, model)
    if plan.cuda_graphs:
        forward = replaying(forward, keeps=True)
    model.eval()
    try:
        with (
            _NOTHING if plan.saves_memory else memory.keep_freed_memory(),
            _NOTHING if world.data_group is None else buffers_agreed(model, world.data_group),
            autocast(plan.precision, world.device),
            setup.carried.apart(),
            _parameters_kept(setup, model),
        ):
            for batch in batches:
                seed_slice(setup, batch)  # each evaluation draws the same
                for micro in batch.microbatches:
                    with draws(setup, batch, micro):
                        output = forward(entering(micro))
                        if not setup.carried.evaluated:
                            setup.carried.evaluated = True
                            _note_batch_outputs(setup, forward, micro, output)
                        scorer.add(output, micro, batch)
                        del output  # which would be kept during the next forward
    finally:
        model.train()
    scores = scorer.scores(samples)
    if plan.uses_fsdp:
        reshard(model)
    return scores


def _note_batch_outputs(setup: EngineSetup, forward: Callable[[Any], Any], micro: Microbatch, output: Any) -> None:
    """Says if a model in evaluation gives a sample another output when the batch has other samples.

    Nothing is compared where a forward draws, or where inputs or outputs have no row a sample. Collective.
    """
    plan, world, few = setup.plan, setup.world, min(micro.rows // 2, COMPARED_ROWS)
    able = few > 0 and not micro.padding and not plan.compile  # which would compile once more, for another shape
    if plan.uses_fsdp or world.size > world.data_size:  # a forward sends messages
        able = plan.domain == 1 and all(world.gather(able))
    if not able:
        return
    generator = torchs_generator(world.device)
    before = generator.get_state()
    try:
        with with_rows(slice(0, few)):
            alone = tree_leaves(forward(at_rows(micro.inputs, range(few), micro.rows)))
    except Exception:
        return  # what a batch of another size may raise
    if not torch.equal(before, generator.get_state()):
        generator.set_state(before)
        return
    for part, leaf in zip(alone, tree_leaves(output), strict=False):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or part.shape[1:] != leaf.shape[1:]:
            continue
        if leaf.shape[:1] != (micro.rows,) or part.shape[:1] != (few,):
            continue
        gap = (part - leaf[:few]).abs().max()
        if gap > RELATIVE.get(leaf.dtype, ROUNDING) * leaf.abs().max():
            setup.carried.note(
                "in evaluation the model gives a sample another output when the batch has other samples: scores depend "
                "on validation_batch, and on the plan"
            )
            return
