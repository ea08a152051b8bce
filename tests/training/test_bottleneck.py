"""The bottleneck: planted times are named, with the change; healthy ones are not; and real trainings say it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grappe.profiling.phases import PHASES
from grappe.training.bottleneck import Bottleneck, RankTimes, bottleneck, underused
from grappe.training.run import Run
from grappe.verbs.runs import utilisation
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]


def times(
    *, host: str = "n1", cores: tuple[int, ...] = (0, 1, 2, 3), device: str = "cpu", processor: float | None = None,
    loading: float | None = None, workers: float = 0.0, delayed: float = 0.0, threads: int = 2, own_cores: int = 4,
    steps: int = 1000, gpu: float | None = None, **phases: float,
) -> RankTimes:  # fmt: skip
    """A process's times of 100 seconds: what `phases` leave is forward's, and loading computes."""
    found = dict.fromkeys(PHASES[:-1], 0.0) | phases
    found["forward"] += 100.0 - sum(found.values())
    computing = sum(found[name] for name in ("forward", "backward", "update"))
    loading = found["data"] if loading is None else loading
    return RankTimes(
        steps=steps, phases=found, processor=computing + loading if processor is None else processor, loading=loading,
        workers=workers, delayed=delayed, threads=threads, own_cores=own_cores, host=host, cores=frozenset(cores),
        device=device, gpu=gpu,
    )  # fmt: skip


def found(*processes: RankTimes, workers: int | None = None) -> Bottleneck | None:
    return bottleneck(processes, workers, "store the samples decoded")


@pytest.mark.parametrize(
    ("processes", "kind", "faster", "words"),
    [
        ([times(data=50)], "input", 2.0, "no wait would give 2.0 times the samples/s: store the samples decoded"),
        ([times(), times(data=50)], "input", 2.0, "input-bound"),
        ([times(data=50, loading=5)], "storage", 2.0, "50% of the time, as storage is slow (grappe data stage); no"),
        ([times(evaluation=60)], "evaluation", 1.43, "half as often would give 1.4 times the samples/s"),
        ([times(checkpoint=50)], "saving", 2.0, "ten times less often"),
        ([times(watching=50)], "watching", 1.82, "watchers took 50% of the time: ten times less often would give 1.8"),
        ([times(update=60)], "small batches", 1.43, "updating the weights took 60% of the time: a batch twice as"),
        ([times(communication=60), times(communication=10)], "slow process", 2.0, "process 1 on n1 computes 2.2 times"),
        ([times(communication=60), times(communication=50)], "communication", 1.33, "twice as large would give at"),
        (
            [times(communication=40, update=20), times(communication=40, update=20)], "communication", 1.43,
            "and changes what is learned",
        ),
        ([times(threads=1)], "threads", 4.0, "1 of 4 cores compute: threads=4 would give at most 4.0 times the sample"),
        ([times(threads=1, workers=200)], "threads", 2.0, "threads=2"),
        ([times(cores=(0,), own_cores=1, threads=1)] * 2, "binding", 2.0, "2 processes on n1 may"),
        ([times(processor=40, delayed=60)], "other programs", 2.5, "for 60% of the time: cores of its own"),
        ([times(device="cuda", checkpoint=50, processor=5)], "saving", 2.0, "saving took 50%"),
    ],
)  # fmt: skip
def test_a_planted_cause_is_named_with_the_change(
    processes: list[RankTimes], kind: str, faster: float, words: str
) -> None:
    one = found(*processes)
    assert one is not None
    assert (one.kind, round(one.faster, 2)) == (kind, faster)
    assert words in one.sentence


@pytest.mark.parametrize(
    ("process", "now", "kind", "faster", "words"),
    [
        (times(data=50), 0, "input", 2.0, "took 50% of the time; workers=2 would give 2.0 times the samples/s"),
        (times(data=75, loading=1), 0, "storage", 4.0, "; workers=4 would"),
        (times(data=90, loading=1, own_cores=2, threads=1), 0, "storage", 10.0, "; workers=10 would"),
        (times(data=50, loading=10, processor=40, delayed=40), 0, "input", 2.0, "; workers=2 would"),  # a busy core
        (times(data=50, loading=1, own_cores=2, steps=2000), 0, "storage", 1.67, "; workers=2 would"),  # they interrupt
        (times(data=50, loading=0, workers=99), 1, "input", 2.0, "; workers=3 would"),
        (times(data=50, loading=0, workers=3), 1, "storage", 2.0, "; workers=3 would"),
        (times(data=50, loading=48), 1, "input", 2.0, "; workers=3 would"),  # a thread, which loads all the time
        (times(data=50, own_cores=2, threads=2, processor=150), 0, "input", 1.29, "; workers=1 would give 1.3 times"),
        (times(data=50, own_cores=1, threads=1), 0, "input", 2.0, "no wait would give 2.0 times the samples/s: make a"),
    ],
)
def test_the_number_of_workers_is_that_which_its_cores_can_run(
    process: RankTimes, now: int, kind: str, faster: float, words: str
) -> None:
    one = found(process, workers=now)
    assert one is not None
    assert (one.kind, round(one.faster, 2)) == (kind, faster)
    assert words in one.sentence


@pytest.mark.parametrize(
    "processes",
    [
        [times()],
        [times(data=5, evaluation=10, checkpoint=5, watching=5)],
        [times(communication=12), times(communication=8)],
        [times(update=38)],
        [times(processor=350, threads=4)],
        [times(processor=40)],  # it waits for something, and not for a core
        [times(processor=150, delayed=15)],
        [times(processor=390, delayed=50, threads=4)],  # its own threads and workers have its cores
        [times(threads=1, processor=80)],
        [times(threads=1, steps=50_000)],  # small operators
        [times(threads=3, workers=100)],
        [times(device="cuda", processor=5, communication=60), times(device="cuda", communication=60)],
        [times(cores=(0,), own_cores=1, threads=1), times(cores=(0,), own_cores=1, threads=1, host="n2")],
        [times(cores=())],
    ],
)
def test_nothing_is_said_of_a_healthy_training(processes: list[RankTimes]) -> None:
    assert found(*processes) is None


JOB = {"SLURM_CPUS_ON_NODE": "4"}
KEMPNER = {"GRAPPE_WARNS": "0.2 kempner"}


@pytest.mark.parametrize(
    ("processes", "variables", "said"),
    [
        ([times(device="cuda", gpu=0.12)], {}, "the GPU computed 12% of the time, and jobstats warns below 25%"),
        (
            [times(device="cuda", gpu=each) for each in (0.1, 0.2)],
            KEMPNER,
            "2 GPUs computed 15% of the time, and kempner",
        ),
        (
            [times(device="cuda", gpu=0.1), times(device="cuda")],
            KEMPNER,
            "the GPU computed 10% of the time, and kempner",
        ),
        ([times(device="cuda", gpu=0.22)], KEMPNER, ""),
        ([times(device="cuda", gpu=0.25)], JOB, ""),
        ([times(device="cuda", processor=1)], JOB, ""),  # the GPU does not tell, and the host need not compute
        ([times(processor=100)], JOB, "1.0 of the job's 4 cores computed, and jobstats warns below 65%"),
        ([times(processor=100), times(processor=100)], JOB, "2.0 of the job's 4 cores computed"),
        ([times(processor=100), times(processor=100, host="n2")], JOB, "2.0 of the job's 8 cores computed"),
        ([times(processor=270)], JOB, ""),
        ([times(processor=10)], {"SLURM_CPUS_ON_NODE": "1"}, ""),
        ([times(processor=10)], {}, ""),
    ],
)
def test_a_use_below_what_sites_warn_at_is_said(
    processes: list[RankTimes], variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_CPUS_ON_NODE", "GRAPPE_WARNS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = underused(processes)
    assert found.startswith(said) if said else not found


SLOW_DATA = """
import time, torch
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self): return 1100
    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.ones(4), torch.ones(1)
"""
SCRIPT = """
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets in DataLoader(Slow(), batch_size=5):
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LOOP = """
import grappe
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with grappe.Loop(run="run") as loop:
    model, optimizer = loop.parallelize(model, optimizer)
    for inputs, targets in loop.batches(Slow(), batch_size=5):
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
TASK = """
import grappe
class Waiting(grappe.Task):
    batch_size: int = 5
    epochs: int = 1
    def model(self): return torch.nn.Linear(4, 1)
    def data(self, split, folder): return Slow()
    def optimizer(self, parameters): return torch.optim.SGD(parameters, lr=0.1)
    def loss(self, outputs, targets): return ((outputs - targets) ** 2).mean(1)
"""
WAYS = {
    "launch": (SCRIPT, ["-m", "grappe", "launch", "--run", "run", "train.py"]),
    "loop": (LOOP, ["train.py"]),
    "task": (TASK, ["-m", "grappe", "train", "train.py:Waiting", "--run", "run", "--plan", "workers=0", "--no-check"]),
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.nightly) for way in WAYS if way != "loop"] + ["loop"]
)
def test_a_training_that_waits_for_data_says_so_after_200_steps_and_at_the_end(way: str, tmp_path: Path) -> None:
    modules = ("grappe.training.bottleneck", "grappe.training.headspace")
    short = [f"import {module}\n{module}.LEAST_SECONDS = 1\n" for module in modules]
    quiet = "grappe.training.bottleneck._other_programs = lambda times: None\n"  # this machine's are not the test's
    (tmp_path / "sitecustomize.py").write_text("".join([*short, quiet]))
    text, command = WAYS[way]
    (tmp_path / "train.py").write_text(SLOW_DATA + text)
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}", "SLURM_CPUS_ON_NODE": "8"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = Run(tmp_path / "run").read_description()["bottleneck"]
    assert re.match(r"\d\.\d of the job's 8 cores computed, and jobstats warns below 65%: input-bound: ", written), (
        written
    )
    said = done.stdout + done.stderr
    assert said.count("input-bound: ") == said.count("jobstats warns below") == 2, said
    assert re.fullmatch(r"\d\.\d/\d+ cores", utilisation(Run(tmp_path / "run").read_description()))
    assert (tmp_path / "run/usage.jsonl").exists()
