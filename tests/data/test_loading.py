"""Ways to load: no way changes a sample, workers outlive an evaluation, and the quickest way is found and kept."""

import errno
import itertools
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset

from grappe import Task
from grappe.data import source
from grappe.data.loader import evaluation_loader, training_loader
from grappe.data.loading import STEPS, TURNS, WARM, Cost, Loading, Tuner, kinds_of, record, recorded, search
from grappe.data.seeded import keyed_sample
from grappe.data.source import ThreadedBatches
from grappe.errors import GrappeError, PlanError, TaskError
from grappe.plan import Plan
from grappe.private_api.torch import end_data_workers
from grappe.profiling.phases import DATA, FORWARD, PHASES
from tests.data.test_loader import world

WAYS = ("workers=0", "workers=1", "workers=3", "workers=1,loading=threads", "workers=3,loading=threads,prefetch=5")


class Drawn(Dataset):
    """Keyed samples: what is drawn depends on the key alone."""

    keyed = True

    def __len__(self) -> int:
        return 37

    def sample(self, index: int, key: int) -> tuple[torch.Tensor, int]:
        return torch.rand(3, generator=torch.Generator().manual_seed(key)), index

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        raise AssertionError("a keyed dataset is asked by key")


class Pids(Dataset):
    """Samples that say which process has loaded them."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([os.getpid()]), index


class Ten(Task):
    """A batch size: nothing is trained."""

    batch_size: int = 10


def rows(plan: str, data: Dataset, make=training_loader, passes: int = 1) -> list[list[float]]:
    loader = make(Ten(), data, Plan.parse(plan), world(0, 1))
    steps = loader.order.steps_per_epoch
    found = [
        micro.inputs.flatten().tolist()
        for _ in range(passes)
        for batch in loader.batches(0, 2 * steps if make is training_loader else steps)
        for micro in batch.microbatches
    ]
    loader.sources.close()
    return found


@pytest.mark.parametrize("data", [Drawn(), Subset(Drawn(), list(range(5, 30)))])
@pytest.mark.parametrize("make", [training_loader, evaluation_loader])
def test_no_way_to_load_changes_a_sample(data: Dataset, make: Callable) -> None:
    first, *others = (rows(plan, data, make, passes=2) for plan in WAYS)
    assert all(other == first for other in others)
    assert len({value for row in first for value in row}) > 70


@pytest.mark.parametrize("plan", ["workers=2", "workers=2,loading=threads"])
def test_workers_outlive_an_evaluation(plan: str) -> None:
    data = Drawn() if "threads" in plan else Pids()
    loader = evaluation_loader(Ten(), data, Plan.parse(plan), world(0, 1))

    def evaluated() -> set[object]:
        values = {value for batch in loader.batches(0, 1) for value in batch.microbatches[0].inputs.flatten().tolist()}
        return values if data.__class__ is Pids else set(threading.enumerate())

    assert evaluated() == evaluated() == evaluated()
    loader.sources.close()
    names = [one.name for one in threading.enumerate()]
    assert not any(name.startswith("grappe-data") for name in names)


def test_a_pass_that_is_broken_off_leaves_no_worker() -> None:
    loader = training_loader(Ten(), Pids(), Plan.parse("workers=1"), world(0, 1))
    batches = loader.batches(0, 2)
    pid = int(next(batches).microbatches[0].inputs[0])
    batches.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert len(list(loader.batches(0, 2))) == 2
    two = list(itertools.islice(zip(loader.batches(0, 2), loader.batches(0, 2), strict=True), 2))
    assert all(bool((one.ids == other.ids).all()) for one, other in two)  # two passes at once


@pytest.mark.parametrize("plan", ["workers=0", "workers=2", "workers=2,loading=threads,prefetch=3"])
def test_a_pass_begins_at_its_own_step_after_one_that_was_broken_off(plan: str) -> None:
    loader, alone = (training_loader(Ten(), Drawn(), Plan.parse(each), world(0, 1)) for each in (plan, "workers=0"))
    broken_off = loader.batches(0, 4)
    next(broken_off)
    broken_off.close()
    for batch, expected in zip(loader.batches(5, 8), alone.batches(5, 8), strict=True):
        assert torch.equal(batch.microbatches[0].inputs, expected.microbatches[0].inputs)
    loader.sources.close()


def test_threads_keep_the_training_threads() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        found: list[int] = []
        batches = ThreadedBatches(lambda _: found.append(torch.get_num_threads()), list, workers=2, ahead=1)
        batches.begin(iter([[(0, index) for index in range(8)]]))
        batches.next()
        batches.close()
        assert torch.get_num_threads() == 2
        assert set(found) == {1}
    finally:
        torch.set_num_threads(before)


class Failing(Drawn):
    """A sample fails."""

    def sample(self, index: int, key: int) -> tuple[torch.Tensor, int]:
        if index == 7:
            raise TaskError("sample 7 is bad")
        return super().sample(index, key)


def test_what_a_thread_raises_is_raised_once_and_no_thread_is_left() -> None:
    loader = training_loader(Ten(), Failing(), Plan.parse("workers=3,loading=threads"), world(0, 1))
    with pytest.raises(TaskError, match="sample 7 is bad"):
        list(loader.batches(0, 4))
    assert not any(one.name.startswith("grappe-data") for one in threading.enumerate())


@pytest.mark.parametrize("make", [training_loader, evaluation_loader])
def test_threads_need_a_keyed_dataset_and_say_so_at_once(make) -> None:
    with pytest.raises(TaskError, match=r"Pids draws .* `keyed = True` and a method sample"):
        make(Ten(), Pids(), Plan.parse("workers=1,loading=threads"), world(0, 1))
    assert kinds_of(Plan(), keyed=False) == ("processes",)
    assert kinds_of(Plan(), keyed=True) == ("threads", "processes")


def test_a_subclass_with_samples_of_its_own_is_not_keyed_by_its_base() -> None:
    class Relabelled(Drawn):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.zeros(3), index + 100

    class Forwarding(Dataset):
        def __init__(self) -> None:
            self.inner = Drawn()

        def __getattr__(self, name: str) -> object:
            return getattr(self.__dict__["inner"], name)

        def __len__(self) -> int:
            return 37

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.zeros(3), index + 100

    for data in (Relabelled(), Forwarding()):
        assert keyed_sample(data) is None
        assert rows("workers=0", data)[0] == [0.0] * 30

    class Again(Relabelled):
        keyed = True

        def sample(self, index: int, key: int) -> tuple[torch.Tensor, int]:
            return torch.ones(3), index

    assert keyed_sample(Again()) is not None


def test_threads_that_cannot_be_started_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    started, real = [], threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("grappe-data"):
            started.append(thread)
            if len(started) == 3:
                raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    loader = training_loader(Ten(), Drawn(), Plan.parse("workers=4,loading=threads"), world(0, 1))
    with pytest.raises(PlanError, match="4 threads cannot be started"):
        next(loader.batches(0, 1))
    assert not any(one.name.startswith("grappe-data") for one in threading.enumerate())


class Killing(Pids):
    """A sample ends its worker, as the kernel does when memory is short."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_killed_worker_ends_the_training_with_one_message() -> None:
    loader = training_loader(Ten(), Killing(), Plan.parse("workers=2"), world(0, 1))
    with pytest.raises(GrappeError, match=r"a data worker was ended by SIGKILL.*workers="):
        list(loader.batches(0, 2))


class Many(Pids):
    """A sample is of many tensors, each of which is a file that is open."""

    tensors = 0

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], int]:  # type: ignore[override]
        return {str(number): torch.ones(2) for number in range(self.tensors)}, 0


@pytest.mark.parametrize("tensors", [100, 300])  # while it hands over a batch, and while it makes one
def test_too_many_open_files_in_a_worker_end_the_training_with_one_message(tensors: int, monkeypatch) -> None:
    monkeypatch.setattr(Many, "tensors", tensors)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    loader = training_loader(Ten(), Many(), Plan.parse("workers=1,loading=processes"), world(0, 1))
    try:
        others = len(list(Path("/proc/self/fd").iterdir()))  # left open by tests before
        resource.setrlimit(resource.RLIMIT_NOFILE, (others + 180, hard))
        with pytest.raises(GrappeError, match=r"a data worker .*loading=threads"):
            list(loader.batches(0, 2))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Disconnected(Pids):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        raise ConnectionResetError("of a worker's socket")


def test_a_worker_whose_end_is_reported_while_it_is_ended_says_why(monkeypatch) -> None:
    def end(loaded: Any) -> None:
        end_data_workers(loaded)
        monkeypatch.undo()
        raise RuntimeError(f"DataLoader worker (pid 1) exited unexpectedly with exit code {errno.EMFILE}.")

    monkeypatch.setattr(source, "end_data_workers", end)
    loader = training_loader(Ten(), Disconnected(), Plan.parse("workers=1,loading=processes"), world(0, 1))
    with pytest.raises(PlanError, match=r"too many open files"):
        next(loader.batches(0, 1))


def test_a_worker_that_ignores_signals_ends_when_it_is_terminated() -> None:
    """As torch does with a loader that only the garbage collector finds, whose queues are closed before it."""
    batches = training_loader(Ten(), Pids(), Plan.parse("workers=1,loading=processes"), world(0, 1)).batches(0, 2)
    others = multiprocessing.active_children()  # of tests before
    next(batches)
    (worker,) = set(multiprocessing.active_children()).difference(others)
    os.kill(worker.pid, signal.SIGTERM)
    next(batches)
    worker.terminate()
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
    batches.close()


def test_batches_of_an_evaluation_are_as_large_as_the_plan_says(tmp_path: Path) -> None:
    sizes = [len(one) for one in rows("validation_batch=5", Pids(), evaluation_loader)]
    assert sizes == [5, 5, 2]

    class Whole(Ten):
        whole_batch_loss = True

    with pytest.raises(PlanError, match="compares the samples"):
        evaluation_loader(Whole(), Pids(), Plan.parse("validation_batch=5"), world(0, 1))


def driven(going: Generator, cost: Callable[[Loading], Cost]) -> tuple[Loading, list[Loading]]:
    """Runs a search; its result, and the ways tried."""
    tried = [next(going)]
    with pytest.raises(StopIteration) as end:
        while True:
            tried.append(going.send(cost(tried[-1])))
    return end.value.value, tried


def quickest(first: Loading, kinds: tuple, most: int, costs: dict[str, tuple[float, float]]) -> tuple[str, list[str]]:
    """Runs the search where each way costs (seconds, share of waiting)."""
    best, tried = driven(search(first, kinds, most), lambda now: Cost(*costs[str(now)]))
    return str(best), [str(way) for way in tried]


def test_the_search_finds_the_quickest_and_tries_no_more_than_it_must() -> None:
    both, nothing = ("threads", "processes"), Loading()
    idle = {"workers=0": (1.0, 0.01)}
    assert quickest(nothing, both, 4, idle) == ("workers=0", ["workers=0"])
    one, two, four = (f"workers={count},loading=threads" for count in (1, 2, 4))
    other = "workers=1,loading=processes"
    costs = {"workers=0": (2.0, 0.5), one: (1.5, 0.3), other: (1.8, 0.4), two: (1.2, 0.1), four: (1.19, 0.1)}
    tried = ["workers=0", one, other, two, four]
    turns = [found for way, best in ((four, two),) for found in (best, way) * (TURNS - 1)]
    assert quickest(nothing, both, 64, costs) == ("workers=2,loading=threads", tried + turns)
    many = {f"workers={count},loading=processes": (1.0 / count, 0.9) for count in (8, 16, 32, 48)}
    assert quickest(Loading(workers=8), ("processes",), 48, many)[0] == "workers=48,loading=processes"
    said = {"workers=3,loading=processes": (1.0, 0.5), "workers=3,loading=threads": (0.7, 0.5)}
    assert quickest(Loading(workers=3), both, 3, said) == ("workers=3,loading=threads", list(said))


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("disturbed", ["workers=2,loading=threads", "workers=2,loading=processes"])
def test_one_disturbed_measurement_of_close_ways_chooses_no_slower_one(late: int, disturbed: str) -> None:
    """The machine is busy once, while one of two close ways is measured: the quicker is found all the same."""
    first, second = Loading(kind="processes", workers=2), Loading(kind="threads", workers=2)
    costs = {str(first): 1.0, str(second): 0.9}
    seen: list[str] = []

    def cost(now: Loading) -> Cost:
        name = str(now)
        seen.append(name)
        busy = 1.1 if name == disturbed and seen.count(name) == late + 1 else 1.0
        return Cost(busy * costs[name], 0.5)

    assert driven(search(first, ("threads", "processes"), 2), cost)[0] == second
    assert sorted(seen) == sorted([*costs] * TURNS)


def test_the_search_takes_no_more_workers_than_there_is_memory_for() -> None:
    going = search(Loading(workers=2), ("processes",), 64, lambda way: way.workers <= 4)
    best, tried = driven(going, lambda now: Cost(1.0 / now.workers, 0.9))
    assert [way.workers for way in tried] == [2, 4] and best.workers == 4


def test_a_tuner_changes_the_way_between_steps_and_says_what_it_chose() -> None:
    steps, spent, chosen = 0, [0.0] * len(PHASES), []
    costs = {"workers=0": 1.0, "workers=1,loading=processes": 0.1}
    where = {"first": Loading(), "kinds": ("processes",), "most": 1, "device": "cpu", "seconds": 0.0}
    tuner = Tuner(spent=lambda: (steps, list(spent)), chosen=chosen.append, **where)
    now, changes = Loading(), []
    while not chosen:
        steps += 1
        spent[DATA] += costs[str(now)]
        spent[FORWARD] += 1.0
        if (another := tuner.step()) is not None:
            now = another
            changes.append(steps)
    assert chosen == [Loading(workers=1)]
    assert changes == [WARM + STEPS]


def test_a_run_remembers_what_was_measured_where_it_was() -> None:
    known = record(Loading(kind="threads", workers=4), 8, "cpu")
    kinds = ("threads", "processes")
    assert recorded(known, kinds, 8, "cpu") == Loading(kind="threads", workers=4)
    assert recorded(known, kinds, 16, "cpu") is None
    assert recorded(known, kinds, 8, "cuda") is None
    assert recorded(known, ("processes",), 8, "cpu") is None
    for damage in (None, [], {**known, "workers": "4"}, {**known, "workers": 10**9}, {**known, "kind": ["x"]}):
        assert recorded(damage, kinds, 8, "cpu") is None
