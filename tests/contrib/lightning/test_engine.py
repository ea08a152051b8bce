"""The Lightning engine's own parts: that its Trainer runs the loop, where it stands, and what it leaves alone."""

import os
import signal
from pathlib import Path

import pytest

from grappe import engines
from grappe.checkpoint.initial import built
from grappe.contrib.lightning import engine as lightning
from grappe.contrib.lightning.engine import Lightning
from grappe.data.batch import Batch
from grappe.data.loader import training_loader
from grappe.engines.base import EngineSetup
from grappe.errors import PlanError
from grappe.launch.rank import ProcessRank, rank_from_environment
from grappe.launch.world import World, join
from grappe.plan import Plan
from grappe.training.run import Run
from tests.commands import GRAPPE, SLOW, pids_in_training
from tests.parity.tasks import Images
from tests.processes import Pool

STEPS = 6


def made(
    plan: str, process: ProcessRank | None = None, rendezvous_folder: Path | None = None
) -> tuple[Lightning, list[Batch]]:
    """An engine, and the batches of all steps."""
    task, parsed = Images(), Plan.parse(plan)
    world = join(parsed, process or ProcessRank(), rendezvous_folder or Path())
    loader = training_loader(task, task.data("train", Path()), parsed, world)
    setup = EngineSetup(task=task, plan=parsed, world=world, weights=built(task), total_steps=STEPS)
    return Lightning(setup), list(loader.batches(0, STEPS))


def test_the_trainer_runs_the_loop_and_reads_no_batch_before_its_turn(monkeypatch) -> None:
    from grappe.contrib.lightning import fit

    engine, batches = made("engine=lightning,microbatches=2,threads=1")
    trainers, taken, behind = [], [], []
    make = fit.make_trainer
    monkeypatch.setattr(fit, "make_trainer", lambda *all: trainers.append(make(*all)) or trainers[0])
    handler = signal.getsignal(signal.SIGTERM)

    def after(result) -> bool:
        assert signal.getsignal(signal.SIGTERM) is handler, "Lightning has taken a signal over"
        behind.append((len(taken), trainers[0].global_step))
        return len(behind) == 4

    engine.train((taken.append(batch) or batch for batch in batches), after)
    assert behind == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert signal.getsignal(signal.SIGTERM) is handler


def test_it_trains_again_where_it_was_stopped() -> None:
    (engine, batches), (other, same) = made("engine=lightning,threads=1"), made("engine=lightning,threads=1")
    engine.train(iter(batches), lambda result: False)
    other.train(iter(same[:2]), lambda result: False)
    other.train(iter(same[2:]), lambda result: False)
    other.train(iter(()), lambda result: pytest.fail("there was no step"))
    for (_, whole), (_, parts) in zip(engine.train_state.export(), other.train_state.export(), strict=True):
        assert whole.equal(parts)


def strategies(process: ProcessRank, rendezvous_folder: Path, plan: str) -> tuple[str, int, int, int]:
    """Returns the strategy of a plan's Trainer, and its numbers of processes."""
    from grappe.contrib.lightning.fit import make_trainer

    engine, _ = made(plan, process, rendezvous_folder)
    trainer = make_trainer(engine._parts, [])
    kind = type(trainer.strategy).__mro__[2].__name__
    engine._parts.setup.world.leave()
    return kind, trainer.num_devices, trainer.num_nodes, trainer.world_size


@pytest.mark.parametrize(
    ("plan", "size", "kind"),
    [
        ("engine=lightning", 1, "SingleDeviceStrategy"),
        ("engine=lightning,replicate=2", 2, "DDPStrategy"),
        ("engine=lightning,shard=2", 2, "ModelParallelStrategy"),
    ],
)
def test_the_plan_chooses_lightnings_strategy(pool: Pool, plan: str, size: int, kind: str) -> None:
    for found in pool.run(f"{__name__}:strategies", size, f"{plan},device=cpu,threads=1"):
        assert found == (kind, size, 1, size)


# srun on two nodes with four processes each, as IDRIS's page has it, seen from the second node's third
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NNODES": "2"}
SLURM |= {"SLURM_PROCID": "6", "SLURM_LOCALID": "2", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}


def test_under_slurm_it_stands_where_srun_put_it() -> None:
    import torch

    from grappe.contrib.lightning.fit import Here

    process = rank_from_environment(SLURM)
    world = Here(World(process=process, device=torch.device("cpu")))
    assert (world.global_rank(), world.local_rank(), world.node_rank(), world.world_size()) == (6, 2, 1, 8)
    assert world.creates_processes_externally


def test_a_signal_saves_and_ends_with_75(start, tmp_path: Path) -> None:
    plan = ("--plan", "engine=lightning,replicate=2,device=cpu,threads=1")
    command = start(GRAPPE, "train", SLOW, "--run", "run", *plan)
    pids_in_training(tmp_path / "run", 2)
    os.kill(command.process.pid, signal.SIGTERM)
    code, out, err = command.end()
    assert (code, err) == (75, "")
    assert "interrupted, saved" in out
    assert Run(tmp_path / "run").latest().step > 0
    code, out, err = start(GRAPPE, "train", SLOW, "pause=0", "epochs=8", "--run", "run", *plan).end()
    assert (code, err) == (0, "")
    assert "finished, 64 steps" in out
    assert [one["step"] for one in Run(tmp_path / "run").records("step")] == list(range(1, 65))


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(PlanError, match=r"no fp16 with offload.*engine=deepspeed"):
        engines.check(Plan.parse("engine=lightning,shard=2,offload=cpu,precision=fp16"))
    with pytest.raises(PlanError, match="engine=lightning has no pipeline"):
        engines.check(Plan.parse("engine=lightning,pipeline=2"))


def test_without_the_package_it_says_how_to_install_it(monkeypatch) -> None:
    monkeypatch.setattr(lightning.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match=r"pip install 'grappe\[lightning\]'"):
        engines.check(Plan.parse("engine=lightning"))


def test_lightning_takes_a_script_under_submit_for_no_slurm_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it neither requeues the job nor replaces signal handlers: the job's script sets this name."""
    from lightning.fabric.plugins.environments import SLURMEnvironment

    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_JOB_NAME", "mine")
    assert SLURMEnvironment.detect()
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    assert not SLURMEnvironment.detect()
