"""The textbook engine: data parallelism in plain code, to be read from top to bottom.

It builds what the section "Training on Multiple GPUs" of Dive into Deep Learning (Zhang, Lipton, Li, Smola)
builds, on processes where the book has one process with several GPUs. Every process holds the whole model:

    1. each computes the gradient of its own slice of the batch;
    2. the gradients are summed over the processes, and each gets the sum;
    3. each makes the same update, so that the models stay the same.

The same step as the native engine does it: docs/step.md.

Shapes: W processes, of which this one is `rank`; P parameters; n numbers in the flat vector that is summed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grappe.checkpoint.weights import Weights
from grappe.data.batch import Batch, Microbatch, entering, stored_in
from grappe.data.device_copy import sent
from grappe.engines.base import COMMON, Engine, EngineSetup
from grappe.engines.shared.after_step import AfterStep
from grappe.engines.shared.microbatch import draws, evaluate, first_pass, seed_slice
from grappe.engines.shared.state import ModelState, trained_parameters
from grappe.engines.shared.watched_forward import WatchedForward
from grappe.launch.world import choose_backend
from grappe.parallel.batchnorm import statistics_frozen
from grappe.parallel.materialise import fill, on_meta, refuse_hooks
from grappe.plan import Plan
from grappe.profiling.phases import FORWARD, UPDATE
from grappe.step import exact as exact_rules
from grappe.step.clip import bounding, scale
from grappe.step.exact import Exact
from grappe.step.loss import PAYLOAD_SIZE, StepResult, Sums
from grappe.step.precision import set_gpu_arithmetic
from grappe.step.scores import Scores, make_losses
from grappe.step.task_contract import optimizer_of, schedule_of
from grappe.task import Task, overrides

# ---- 1. The same parameters everywhere (the book's get_params) -----------------------------------------


def get_params(task: Task, weights: Weights, device: torch.device, kind: torch.dtype) -> nn.Module:
    """Makes the model with the values of `weights`, on `device`.

    The book copies parameters from one GPU to the others. Here every process makes the model without values and reads
    the same values, so nothing is sent. Then the models stay the same because their updates are the
    same, to the last bit: otherwise the models would diverge.
    """
    model = on_meta(task, kind)
    fill(model, weights, device)
    return model


# ---- 2. Summing a vector over the processes (the book's allreduce) -------------------------------------


def naive_all_reduce(vector: Tensor, rank: int, size: int) -> None:
    """Replaces `vector` [n] by its sum over the processes, as in the book: process 0 does all the work.

    First W - 1 vectors come in, one after the other, then W - 1 go out: 2 (W - 1) n numbers pass over the
    link of process 0, while the others wait. With each process that joins, everybody waits longer.
    """
    if rank == 0:
        incoming = torch.empty_like(vector)
        for other in range(1, size):
            dist.recv(incoming, src=other)
            vector += incoming
        for other in range(1, size):
            dist.send(vector, dst=other)
    else:
        dist.send(vector, dst=0)
        dist.recv(vector, src=0)


# The book's exercise 3 asks for an allreduce that aggregates different parameters on different GPUs, and why
# that is more efficient. Cut the vector into W chunks, and let each process sum up another one. The processes
# stand in a ring, 0 -> 1 -> ... -> W-1 -> 0; in each turn everybody sends a chunk to the right while another
# comes in from the left. For W = 3 and the chunks a b c, where a01 is the sum of what 0 and 1 had of a:
#
#                           process 0            process 1            process 2
#                           a0    b0    c0       a1    b1    c1       a2    b2    c2
#    reduce-scatter
#      turn 0, sends        a                    b                    c
#      and adds             a0    b0    c02      a01   b1    c1       a2    b12   c2
#      turn 1, sends        c                    a                    b
#      and adds             a0    b012  c02      a01   b1    c012     a012  b12   c2
#    all-gather
#      turn 0, sends        b                    c                    a
#      and replaces         a012  b012  c02      a01   b012  c012     a012  b12   c012
#      turn 1, sends        a                    b                    c
#      and replaces         a012  b012  c012     a012  b012  c012     a012  b012  c012
#
# That is 2 (W - 1) turns of n / W numbers, and every link is busy in each: 2 (W - 1) / W x n numbers pass
# over a link one after the other, against 2 (W - 1) x n over process 0's link above. It is never more than
# 2 n, however many processes there are, and the least that they can do among themselves (Patarasuk and Yuan,
# 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"). The price: a short vector
# waits for the latency of 2 (W - 1) messages, one after the other.
#
# Each chunk is summed up once, in one order, and then copied, so all processes get the same bits. If each
# summed for itself, in an order of its own, they would not.


def ring_all_reduce(vector: Tensor, rank: int, size: int) -> None:
    """Replaces `vector` [n] by its sum over the processes: reduce-scatter, then all-gather.

    Where W does not divide n, the first n mod W chunks are longer by one; where n < W, some are empty. A
    single process has one chunk, no turn, and an unchanged vector.
    """
    chunks = torch.tensor_split(vector, size)  # views: what is written to them is written to the vector
    reduce_scatter(chunks, rank)
    all_gather(chunks, rank)


def reduce_scatter(chunks: tuple[Tensor, ...], rank: int) -> None:
    """Sums chunks around the ring: process r then has the sum of chunk r + 1, and partial sums in the others."""
    size = len(chunks)
    room = torch.empty_like(chunks[0])  # the first is the longest
    for turn in range(size - 1):
        outgoing, target = chunks[(rank - turn) % size], chunks[(rank - turn - 1) % size]
        incoming = room[: len(target)]
        pass_on(outgoing, incoming, rank, size)
        target += incoming


def all_gather(chunks: tuple[Tensor, ...], rank: int) -> None:
    """Sends the sums around the ring, from process r, which has chunk r + 1's sum, until every process has all."""
    size = len(chunks)
    for turn in range(size - 1):
        pass_on(chunks[(rank + 1 - turn) % size], chunks[(rank - turn) % size], rank, size)


def pass_on(outgoing: Tensor, incoming: Tensor, rank: int, size: int) -> None:
    """Sends to the right neighbour and receives from the left one, both at once.

    If all processes first sent and then received, each could wait for ever until its neighbour starts to receive.
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    both = [dist.P2POp(dist.isend, outgoing, right), dist.P2POp(dist.irecv, incoming, left)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


# ---- 3. One step, seen from one process (the book's train_batch) ---------------------------------------


class Textbook(Engine):
    """Engine with the whole model on every process, which sums the gradients by hand between backward and update."""

    supported_keys = COMMON | {"replicate", "microbatches", "exact", "precision"}
    about = "replication written out by hand, with a ring all-reduce of its own: for reading"

    @classmethod
    def unsupported_reason(cls, plan: Plan) -> str | None:
        if plan.precision not in ("fp32", "fp64"):
            return f"engine=textbook has no precision={plan.precision}: use fp32 or fp64, or engine=native"
        return exact_rules.unsupported_reason(plan) if plan.exact else None

    def __init__(self, setup: EngineSetup) -> None:
        self._setup, self._task, self._world = setup, setup.task, setup.world
        set_gpu_arithmetic(setup.plan.precision)  # switches it off
        self._model = get_params(self._task, setup.weights, self._world.device, stored_in(setup.plan))
        refuse_hooks(self._model, setup.plan)
        named = trained_parameters(self._model)
        self._parameters = [parameter for _, parameter in named]
        self._sizes = [parameter.numel() for parameter in self._parameters]
        self._losses = make_losses(self._task, setup.plan, setup.world, setup.observers)
        self._optimizer = optimizer_of(self._task, named)
        setup.observers.optimizer(self._optimizer, named)
        self._schedule = schedule_of(self._task, self._optimizer, setup.total_steps)
        # What is saved: parameters and optimizer state once, since all have the same; the buffers of each process.
        self.train_state = ModelState(
            model=self._model, optimizer=self._optimizer, schedule=self._schedule, world=self._world
        )
        self._all_reduce = ring_all_reduce  # naive_all_reduce gives the same sums, up to rounding
        self._wire = _wire(setup)
        plan = setup.plan
        self._exact = (
            Exact(self._model, self._parameters, plan, self._world, self._task.forward) if plan.exact else None
        )
        call = functools.partial(self._task.forward, self._model)
        self._forward = call if self._exact is None else self._exact.forward
        self._watch = WatchedForward(setup, self._model)
        self._after_step = AfterStep(setup, self._model) if overrides(setup.task, "after_step") else None
        self._model.train()

    def step(self, batch: Batch) -> StepResult:
        # The book's split_batch would be here. The loader has cut the batch before it was even read: `batch`
        # is this process's slice of the global one, which may be larger or smaller than another's, or empty.
        sums, norm = self._summed(batch) if self._exact is None else self._summed_exactly(batch, self._exact)
        lr = self._optimizer.param_groups[0]["lr"]
        self._optimizer.step()
        if self._schedule is not None:
            self._schedule.step()
        self._optimizer.zero_grad()
        if self._after_step is not None:
            self._after_step(batch.step)
        return StepResult(batch=batch, sums=sums, norm=norm, skipped=False, lr=lr)

    def _summed(self, batch: Batch) -> tuple[Sums, Tensor | None]:
        # Dropout must differ between slices, and be the same again when a training is resumed.
        seed_slice(self._setup, batch)
        # A loss that compares samples needs all outputs before the first backward.
        first_pass(self._losses, self._setup, self._model, batch, lambda _, micro: self._output(batch, micro))
        loss = torch.zeros((), dtype=stored_in(self._setup.plan), device=self._world.device)
        for micro in batch.microbatches:
            self._setup.observers.phase(FORWARD)
            if micro.rows:
                with draws(self._setup, batch, micro):
                    loss += self._gradients(batch, micro)
            else:  # one padding row that counts nothing; dropout draws for it, as it does on other engines
                with torch.no_grad(), statistics_frozen(self._model):
                    self._output(batch, micro)
        return self._sum_over_processes(loss)

    def _output(self, batch: Batch, micro: Microbatch) -> Any:
        with draws(self._setup, batch, micro):
            return self._watch(self._forward, micro)

    def _summed_exactly(self, batch: Batch, exact: Exact) -> tuple[Sums, Tensor | None]:
        """Computes the same sum in an order that is independent of W, and so are its bits: see step/exact.

        Neither the ring nor plain gradient accumulation has this property: (a + b) + c is not a + (b + c).
        """
        seed = self._task.seed
        first_pass(
            self._losses,
            self._setup,
            self._model,
            batch,
            lambda index, micro: exact.forward_ahead(index, batch.step, seed, entering(micro)),
        )
        for index, micro in enumerate(batch.microbatches):
            loss = None
            self._setup.observers.phase(FORWARD)
            if micro.rows:
                with exact.piece(index, batch.step, self._task.seed):
                    loss = self._gradients(batch, micro)
            exact.add(loss)
        sums = exact.reduce(self._setup.stop.flag, batch.samples)
        self._setup.observers.phase(UPDATE)
        if self._task.clip is None:
            return sums, None
        norm = exact.norm()
        scale(self._parameters, bounding(norm, self._task.clip))
        return sums, norm

    def _gradients(self, batch: Batch, micro: Microbatch) -> Tensor:
        """Adds a microbatch's part to the gradients; returns the sum of its losses.

        The book sums the losses and has its optimizer divide by the batch size. Here backward starts, for
        each loss, from 1 over the count of the *global* batch: the same, and any optimizer will do. The
        mean of the slices' means would be wrong if two slices differ in size.
        """
        loss = self._losses(self._watch(self._forward, micro), micro, batch)
        loss.values.backward(loss.output_gradient)
        return loss.total

    @torch.no_grad()
    def _sum_over_processes(self, loss: Tensor) -> tuple[Sums, Tensor | None]:
        """Replaces each gradient by its clipped sum over the processes; returns the loss's sum and the gradient's norm.

        The book sums one parameter after the other. Every message has a fixed cost, even a short one, so here
        all gradients are sent as one vector, together with the other sums:

            [ gradient of parameter 1 | ... | gradient of parameter P | loss, flag | reached, P numbers ]

        `flag` is above 0 if this process should stop; `reached` is 1 for a parameter with a gradient.
        """
        wire = self._flat(loss).to(self._wire)
        self._all_reduce(wire, self._world.rank, self._world.size)
        gradient, sums, reached = wire.split([sum(self._sizes), PAYLOAD_SIZE, len(self._sizes)])
        pieces = gradient.split(self._sizes)
        for parameter, piece, count in zip(self._parameters, pieces, reached, strict=True):
            # A parameter that no sample reached must keep no gradient: zeros would let weight decay and
            # momentum move it. (`count` is read only where this process cannot know by itself.)
            if parameter.grad is not None or count > 0:
                parameter.grad = piece.view_as(parameter).to(parameter)
        self._setup.observers.phase(UPDATE)
        return Sums(sums.clone()), self._clip(gradient)

    def _flat(self, loss: Tensor) -> Tensor:
        pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        notes = torch.tensor([self._setup.stop.flag, *(p.grad is not None for p in self._parameters)])
        notes = sent(notes, loss.device)
        return torch.cat([*(piece.reshape(-1) for piece in pieces), loss.reshape(1), notes])

    def _clip(self, gradient: Tensor) -> Tensor | None:
        """Scales the parameters' gradients to a norm of at most `clip`; returns the norm before, that of `gradient`."""
        if self._task.clip is None:
            return None
        # In float64: on a CPU, torch's float32 norm of 20 million numbers is wrong by a thousandth.
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        scale(self._parameters, bounding(norm, self._task.clip).to(self._world.device))
        return norm

    # The book's train() calls train_batch for each batch: that is Engine.train, the same for all engines.

    # ---- 4. Evaluation: the book's exercise 4 --------------------------------------------------------------

    def evaluate(self, batches: Iterator[Batch], samples: int) -> Scores:
        """Evaluates each process's own slice; the book evaluates on one GPU, and calls that inefficient.

        Sums and counts are added over processes, and divided once. The models are the same, except for statistics
        of their own samples (batch normalisation's), whose mean is used.
        """
        return evaluate(self._model, self._setup, batches, samples)

    # What the book leaves out, stopping and resuming, is `train_state`, the same for most engines.


def _wire(setup: EngineSetup) -> torch.device:
    """Returns the device for sending the vector: gloo's sends and receives support the CPU's memory only."""
    device = setup.world.device
    direct = setup.world.size == 1 or choose_backend(setup.plan, device) == "nccl"
    return device if direct else torch.device("cpu")


ENGINE = Textbook
