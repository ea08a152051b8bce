"""The largest batch that fits: doubled in fresh processes until memory runs out, then closed in on."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from grappe.errors import GrappeError
from grappe.options import Options
from grappe.place import Place
from grappe.plan import Plan, as_plan
from grappe.task import Task
from grappe.verbs import session
from grappe.verbs.measure import with_batch
from grappe.verbs.train import Request, request
from grappe.verbs.worker import worker as train_worker

STEPS = 3  # the optimizer's state comes with the first, the second has it and the gradients
EIGHTHS = 8  # how close the answer is: no more than an eighth below what just fits
MEMINFO = Path("/proc/meminfo")
OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|MemoryError|bad_alloc|killed by SIGKILL|Cannot allocate",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A few steps of a training, on their way to their processes."""

    training: Request
    limit: int | None
    """Bytes of data that a process may have; None: as many as there are."""

    @property
    def run(self) -> Path | None:
        """Where processes of several nodes meet."""
        return self.training.run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Largest:
    """What was found for a plan."""

    plan: str
    batch: int
    """Samples a step over all processes; 0: not even the smallest fits."""
    too_large: int | None
    """The smallest that was seen not to fit; None: the whole dataset fits."""

    def __str__(self) -> str:
        name = self.plan or "one process"
        if not self.batch:
            return f"largest batch of {name}: not even {self.too_large} fits"
        end = "all of the dataset" if self.too_large is None else f"{self.too_large} does not fit"
        return f"largest batch of {name}: {self.batch} ({end})"


def largest_batch(
    asked: Request,
    plan: Plan,
    folder: Path,
    *,
    limit: int | None = None,
    told: Callable[[str], None] = lambda line: None,
) -> Largest:
    """Tries batch sizes under `plan`.

    Args:
        limit: bytes of data that each process may have; None: on a CPU its share of what is free now, so that
            the system's killer is not needed; on a GPU, what it has.

    Raises:
        GrappeError: it fails for another reason than memory.
    """
    task = asked.task.resolve()
    samples = len(task.data("train", asked.data))  # type: ignore[arg-type]
    bench = _Bench(asked, plan, folder, limit, told)
    fits, fails, batch = 0, None, min(samples, max(plan.data_parallel, task.batch_size))
    while fails is None and fits < samples:
        if bench.fits(batch):
            fits, batch = batch, min(samples, 2 * batch)
        else:
            fails = batch
    least = 2 * plan.data_parallel
    while fails is not None and fails - fits > max(least, fails // EIGHTHS):
        batch = (fits + fails) // 2 // least * least or least
        if batch in (fits, fails):
            break
        fits, fails = (batch, fails) if bench.fits(batch) else (fits, batch)
    return Largest(plan=str(plan), batch=fits, too_large=fails)


def largest_batches(
    task: Task | type[Task] | str,
    plans: Sequence[Plan | str],
    data: Path | str | None = None,
    fields: Mapping[str, str] | None = None,
) -> Iterator[Largest]:
    """The largest batch of each plan; raises as `largest_batch` does."""
    with session.scratch("largest") as folder:
        for number, plan in enumerate(plans):
            yield largest_batch(
                request(task, "", data=data, fields=fields), as_plan(plan), folder / str(number)
            )


class _Bench:
    def __init__(
        self, asked: Request, plan: Plan, folder: Path, limit: int | None, told: Callable[[str], None]
    ) -> None:
        self._asked, self._plan, self._folder, self._told = asked, plan, folder, told
        self._limit = limit or _share(plan)
        self._number = 0

    def fits(self, batch: int) -> bool:
        """Whether a few steps of `batch` samples go through."""
        self._number += 1
        training = dataclasses.replace(
            self._asked,
            task=with_batch(self._asked.task, batch, 1),
            plan=self._plan,
            run=self._folder / f"largest-{self._number}",
            base=self._folder,
            options=Options(steps=STEPS, bare=True),
            quiet=True,
        )
        asked = Asked(training=training, limit=self._limit)
        try:
            session.start("grappe.verbs.largest:worker", asked, self._plan)
        except GrappeError as error:
            if not OUT_OF_MEMORY.search(str(error)):
                raise
            self._told(f"batch {batch} does not fit")
            return False
        self._told(f"batch {batch} fits")
        return True


def worker(asked: Asked, place: Place, meet: Path) -> None:
    """One process. Collective."""
    if asked.limit is not None:
        import resource

        # Counted is data, so that a failure is torch's own message; a limit on addresses would count libraries.
        own = resource.getrlimit(resource.RLIMIT_DATA)[1]  # the user's `ulimit -d`, which may not be raised
        limit = asked.limit if own == resource.RLIM_INFINITY else min(asked.limit, own)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    train_worker(asked.training, place, meet)


def _share(plan: Plan, meminfo: Path = MEMINFO) -> int | None:
    """What a process may take of the host's free memory; None where a GPU's is what matters."""
    import torch

    if plan.device == "cuda" or (plan.device == "auto" and torch.cuda.is_available()):
        return None
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024 // plan.processes
    return None
