"""The horovod engine: replication by Horovod's DistributedOptimizer, whose gradients are summed while backward runs.

Horovod was last released in 2023 and is not maintained; its control servers have unfixed vulnerabilities: anybody who
reaches these servers can run code. So grappe starts Horovod, not horovodrun, and the one server, where the processes
find each other, listens on the loopback interface if all are on one machine, else on this machine's address
in the network that connects the processes: use Horovod in private networks only.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from grappe.data.batch import Batch, stored_in
from grappe.engines.base import COMMON, Engine, EngineSetup
from grappe.engines.shared.after_step import AfterStep
from grappe.engines.shared.microbatch import MicrobatchRunner, evaluate
from grappe.engines.shared.state import ModelState, trained_parameters
from grappe.errors import PlanError
from grappe.launch.world import World
from grappe.parallel.materialise import fill, on_meta
from grappe.plan import Plan
from grappe.profiling.phases import COMMUNICATION, UPDATE
from grappe.step.clip import clipping, gradient_norm
from grappe.step.loss import PAYLOAD_SIZE, StepResult, Sums
from grappe.step.precision import LossScale, set_gpu_arithmetic
from grappe.step.scores import Scores
from grappe.step.task_contract import optimizer_of, schedule_of
from grappe.task import overrides

LOOPBACK = "127.0.0.1"
MISSING = (
    "engine=horovod needs Horovod, whose last release is of 2023 and has to be built: `make horovod` does that "
    "(two minutes, a C++ compiler). It is not maintained and has open CVEs: for private networks only"
)


class Horovod(Engine):
    """Replicates the model; parameters and optimizer state are broadcast before the first step."""

    supported_keys = COMMON | {"replicate", "microbatches"}
    about = "Horovod's DistributedOptimizer on gloo: unmaintained since 2023, with open CVEs; private networks only"

    @classmethod
    def unsupported_reason(cls, plan: Plan) -> str | None:
        return MISSING if importlib.util.find_spec("horovod") is None else None

    def __init__(self, setup: EngineSetup) -> None:
        self._setup, self._task, self._world = setup, setup.task, setup.world
        self._hvd = _started(self._world)
        set_gpu_arithmetic(setup.plan.precision)
        self._model = on_meta(self._task, stored_in(setup.plan))
        fill(self._model, setup.weights, self._world.device)
        named = trained_parameters(self._model)
        self._parameters = [parameter for _, parameter in named]
        self._runner = MicrobatchRunner(setup, self._model, functools.partial(self._task.forward, self._model))
        # Horovod counts the backward passes of each parameter, and sends it with the last.
        self._optimizer: Any = self._hvd.DistributedOptimizer(
            optimizer_of(self._task, named),
            named_parameters=named,
            op=self._hvd.Sum,
            backward_passes_per_step=setup.plan.microbatches,
        )
        setup.observers.optimizer(self._optimizer, named)
        self._schedule = schedule_of(self._task, self._optimizer, setup.total_steps)
        self.train_state = ModelState(
            model=self._model, optimizer=self._optimizer, schedule=self._schedule, world=self._world
        )
        norm = functools.partial(gradient_norm, self._parameters)
        loss_scale = LossScale(setup.plan.precision)
        self._clip = clipping(self._task, setup.plan, loss_scale, self._parameters, norm)
        self._after_step = AfterStep(setup, self._model) if overrides(setup.task, "after_step") else None
        self._alike = False
        self._model.train()

    def step(self, batch: Batch) -> StepResult:
        if not self._alike:
            self._broadcast()
        self._runner.begin(batch)
        for micro in batch.microbatches:
            self._runner.run(batch, micro, lambda loss, _: loss.values.backward(loss.output_gradient))
        self._setup.observers.phase(COMMUNICATION)
        assert self._runner.total is not None
        sums = self._sum(self._runner.total)
        self._setup.observers.phase(UPDATE)
        norm, _ = self._clip() if self._clip is not None else (None, False)
        lr = self._optimizer.param_groups[0]["lr"]
        with self._optimizer.skip_synchronize():
            self._optimizer.step()
        if self._schedule is not None:
            self._schedule.step()
        self._optimizer.zero_grad()
        if self._after_step is not None:
            self._after_step(batch.step)
        return StepResult(batch=batch, sums=sums, norm=norm, skipped=False, lr=lr)

    def _broadcast(self) -> None:
        """Broadcasts process 0's state before the first step, to ensure that all processes start from the same state.

        A checkpoint is read after its commit, which replaces the barrier of Horovod's own examples.
        """
        self._hvd.broadcast_parameters(dict(self._model.named_parameters()), root_rank=0)
        if self._optimizer.state:
            self._hvd.broadcast_optimizer_state(self._optimizer, root_rank=0)
        self._alike = True

    @torch.no_grad()
    def _sum(self, total: Tensor) -> Sums:
        """Waits for the gradients' sums; a parameter with no gradient on any process keeps none, and is not updated."""
        without = [parameter for parameter in self._parameters if parameter.grad is None]
        reached = [float(parameter.grad is not None) for parameter in self._parameters]
        notes = torch.cat([total.reshape(1).cpu(), torch.tensor([self._setup.stop.flag, *reached])])
        handle = self._hvd.allreduce_async_(notes, op=self._hvd.Sum, name="grappe.notes")
        self._optimizer.synchronize()
        sums, counts = self._hvd.synchronize(handle).split([PAYLOAD_SIZE, len(reached)])
        if without:
            for parameter, count in zip(self._parameters, counts.tolist(), strict=True):
                if not count:
                    parameter.grad = None
        return Sums(sums.clone())

    def evaluate(self, batches: Iterator[Batch], samples: int) -> Scores:
        return evaluate(self._model, self._setup, batches, samples)

    def close(self) -> None:
        self._optimizer.zero_grad()
        self._world.barrier()
        self._hvd.shutdown()


def _started(world: World) -> Any:
    """Initialises horovod.torch over the processes of `world` without horovodrun, and returns it. Collective.

    Raises:
        PlanError: Horovod is not installed, or was built for another torch.
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
    """Starts the server through which the processes find each other; horovodrun would start it on every interface."""
    http_server = importlib.import_module("horovod.runner.http.http_server")
    hosts = importlib.import_module("horovod.runner.common.util.hosts")
    alone = world.size == world.process.local_size
    host = LOOPBACK if alone else socket.gethostbyname(socket.gethostname())
    server = http_server.RendezvousHTTPServer((host, 0), http_server.RendezvousHandler, 0)
    slots = f"{host}:{world.size}"
    server.init(hosts.get_host_assignments(hosts.parse_hosts(slots), world.size, world.size))
    threading.Thread(target=server.serve_forever, name="grappe-horovod", daemon=True).start()
    return server, (host, server.server_address[1])


def _environment(world: World, address: tuple[str, int] | None) -> dict[str, str]:
    """Returns the environment variables that horovodrun would set."""
    assert address is not None
    process = world.process
    variables = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address[0],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(address[1]),
        "HOROVOD_HOSTNAME": address[0] if world.size == process.local_size else socket.gethostname(),
        "HOROVOD_RANK": str(process.rank),
        "HOROVOD_SIZE": str(process.size),
        "HOROVOD_LOCAL_RANK": str(process.local_rank),
        "HOROVOD_LOCAL_SIZE": str(process.local_size),
        "HOROVOD_CROSS_RANK": str(process.rank // process.local_size),
        "HOROVOD_CROSS_SIZE": str(-(-process.size // process.local_size)),
    }
    if world.size == process.local_size:
        variables["HOROVOD_GLOO_IFACE"] = "lo"
    return variables


ENGINE = Horovod
