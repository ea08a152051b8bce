"""The horovod engine: replication by Horovod's DistributedOptimizer, whose gradients are summed while backward runs.

Horovod was last released in 2023 and is not maintained; its control servers have unfixed holes through which whoever
reaches them can run code. So it is started by grappe and not by horovodrun, and its one server, where the processes
find each other, listens on the loopback interface when they are all on one machine, else on this machine's address
in the network that the processes meet in: use it in private networks only.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from grappe import evaluation, model_state
from grappe.data.batch import Batch, Microbatch
from grappe.data.feed import rows_of
from grappe.engines.base import COMMON, Saved, Setting, State, Stepper
from grappe.errors import PlanError
from grappe.loop import StepResult
from grappe.losses import Losses
from grappe.plan import Plan
from grappe.prepare.batchnorm import statistics_frozen
from grappe.prepare.clip import bounding, gradient_norm, scale
from grappe.prepare.dropout import seed_dropout
from grappe.prepare.materialise import fill, on_meta
from grappe.prepare.precision import set_tf32
from grappe.prepare.tally import RIDER_SIZE, Sums
from grappe.scores import Scores
from grappe.world import World

LOOPBACK = "127.0.0.1"
MISSING = (
    "engine=horovod needs Horovod, whose last release is of 2023 and has to be built: `make horovod` does that "
    "(four minutes, a C++ compiler). It is not maintained and has open CVEs: for private networks only"
)


class Horovod(Stepper):
    """The whole model on every process; parameters and optimizer state are broadcast before the first step."""

    axes = COMMON | {"replicate", "microbatches"}
    about = "Horovod's DistributedOptimizer on gloo: unmaintained since 2023, with open CVEs; private networks only"

    @classmethod
    def refuse(cls, plan: Plan) -> str | None:
        return MISSING if importlib.util.find_spec("horovod") is None else None

    def __init__(self, setting: Setting) -> None:
        self._task, self._world, self._flag = setting.task, setting.world, setting.flag
        self._hvd = _started(self._world)
        set_tf32(setting.plan.precision)
        self._model = on_meta(self._task)
        fill(self._model, setting.weights, self._world.device)
        named = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]
        self._parameters = [parameter for _, parameter in named]
        self._losses = Losses(self._task)
        # Horovod counts the backward passes of each parameter, and sends it with the last.
        self._optimizer: Any = self._hvd.DistributedOptimizer(
            self._task.optimizer(named),
            named_parameters=named,
            op=self._hvd.Sum,
            backward_passes_per_step=setting.plan.microbatches,
        )
        self._schedule = self._task.schedule(self._optimizer, setting.total_steps)
        self._alike = False
        self._model.train()

    def step(self, batch: Batch) -> StepResult:
        if not self._alike:
            self._broadcast()
        seed_dropout(self._task.seed, batch.step, self._world)
        total = torch.zeros((), device=self._world.device)
        for micro in batch.microbatches:
            total += self._backward(batch, micro)
        sums = self._sum(total)
        norm = self._clip()
        lr = self._optimizer.param_groups[0]["lr"]
        with self._optimizer.skip_synchronize():
            self._optimizer.step()
        if self._schedule is not None:
            self._schedule.step()
        self._optimizer.zero_grad()
        return StepResult(batch=batch, sums=sums, norm=norm, skipped=False, lr=lr)

    def _broadcast(self) -> None:
        """What process 0 has, to all: they have read the same weights, and this says so where they had not."""
        self._hvd.broadcast_parameters(dict(self._model.named_parameters()), root_rank=0)
        if self._optimizer.state:
            self._hvd.broadcast_optimizer_state(self._optimizer, root_rank=0)
        self._alike = True

    def _backward(self, batch: Batch, micro: Microbatch) -> Tensor:
        """Adds a microbatch's share to the gradients; the sum of its losses. A filled-in row counts nothing."""
        with contextlib.nullcontext() if micro.rows else statistics_frozen(self._model):
            output = self._model(micro.inputs)
            rows = micro.rows or rows_of(micro.targets)
            values = self._losses.values(output, micro, rows)
            values.backward(self._losses.seed(values, micro, batch, rows, 1.0))
        return self._losses.total(values, micro, rows)

    @torch.no_grad()
    def _sum(self, total: Tensor) -> Sums:
        """Waits for the gradients' sums; what nobody reached stays without a gradient, so that nothing moves it."""
        without = [parameter for parameter in self._parameters if parameter.grad is None]
        reached = [float(parameter.grad is not None) for parameter in self._parameters]
        notes = torch.cat([total.reshape(1).cpu(), torch.tensor([self._flag(), *reached])])
        handle = self._hvd.allreduce_async_(notes, op=self._hvd.Sum, name="grappe.notes")
        self._optimizer.synchronize()
        sums, counts = self._hvd.synchronize(handle).split([RIDER_SIZE, len(reached)])
        if without:
            for parameter, count in zip(self._parameters, counts.tolist(), strict=True):
                if not count:
                    parameter.grad = None
        return Sums(sums.clone())

    def _clip(self) -> Tensor | None:
        if self._task.clip is None:
            return None
        norm = gradient_norm(self._parameters)
        scale(self._parameters, bounding(norm, self._task.clip))
        return norm

    def evaluate(self, batches: Iterator[Batch], samples: int) -> Scores:
        return evaluation.evaluate(self._model, self._task, self._world, batches, samples)

    def state(self) -> State:
        tensors, own, values = model_state.save(self._model, self._optimizer, self._schedule, self._world)
        return State(tensors=tensors, own=own, values=values)

    def restore(self, saved: Saved) -> None:
        # A checkpoint is read behind its commit, which is the barrier that Horovod's own examples put here.
        model_state.restore(self._model, self._optimizer, self._schedule, self._world, saved)
        self._alike = False

    def export(self) -> Iterator[tuple[str, Tensor]]:
        return model_state.export(self._model, self._world)

    def close(self) -> None:
        self._optimizer.zero_grad()
        self._world.barrier()
        self._hvd.shutdown()


def _started(world: World) -> Any:
    """horovod.torch, initialised over the processes of `world` without horovodrun. Collective.

    Raises:
        PlanError: it is not installed, or it was built for another torch.
    """
    try:
        hvd = importlib.import_module("horovod.torch")
    except ImportError as error:
        raise PlanError(f"{MISSING}: {error}") from error
    server, address = None, None
    if world.rank == 0:
        server, address = _serve(world)
    os.environ.update(_environment(world, world.share(address)))
    hvd.init()
    world.barrier()
    if server is not None:  # all have met: from here on nothing of Horovod's listens
        server.shutdown()
        server.server_close()
    return hvd


def _serve(world: World) -> tuple[Any, tuple[str, int]]:
    """The server through which the processes find each other, as horovodrun would start it on every interface."""
    http_server = importlib.import_module("horovod.runner.http.http_server")
    hosts = importlib.import_module("horovod.runner.common.util.hosts")
    alone = world.size == world.place.local_size
    host = LOOPBACK if alone else socket.gethostbyname(socket.gethostname())
    server = http_server.RendezvousHTTPServer((host, 0), http_server.RendezvousHandler, 0)
    slots = f"{host}:{world.size}"
    server.init(hosts.get_host_assignments(hosts.parse_hosts(slots), world.size, world.size))
    threading.Thread(target=server.serve_forever, name="grappe-horovod", daemon=True).start()
    return server, (host, server.server_address[1])


def _environment(world: World, address: tuple[str, int] | None) -> dict[str, str]:
    """What horovodrun would have set."""
    assert address is not None
    place = world.place
    found = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address[0],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(address[1]),
        "HOROVOD_HOSTNAME": address[0] if world.size == place.local_size else socket.gethostname(),
        "HOROVOD_RANK": str(place.rank),
        "HOROVOD_SIZE": str(place.size),
        "HOROVOD_LOCAL_RANK": str(place.local_rank),
        "HOROVOD_LOCAL_SIZE": str(place.local_size),
        "HOROVOD_CROSS_RANK": str(place.rank // place.local_size),
        "HOROVOD_CROSS_SIZE": str(-(-place.size // place.local_size)),
    }
    if world.size == place.local_size:
        found["HOROVOD_GLOO_IFACE"] = "lo"
    return found


ENGINE = Horovod
