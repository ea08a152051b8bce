"""SIGKILL of whole trainings at random instants, as often as it takes: the end is the same to the bit."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from grappe.training.run import Run
from tests.commands import GRAPPE, Command, send
from tests.patience import PATIENCE_SECONDS

SOAK = "GRAPPE_SOAK" in os.environ
KILLS = int(os.environ["GRAPPE_SOAK"]) // 10 if SOAK else 0
STEPS_BETWEEN = 4  # at least, so that it comes to an end
TASK = str(Path(__file__).with_name("stuck.py")) + ":Quick"


def steps_in(run: Path) -> int:
    return sum(1 for _ in Run(run).records("step")) if Run.is_run(run) else 0


def train(folder: Path, kills: int, steps: int, plan: str, generator: random.Random) -> tuple[Path, int]:
    """Trains to the end through so many kills of the launcher or of one process; how many struck."""
    run, struck = folder / "run", 0
    command_line = (GRAPPE, "train", TASK, "epochs=100000", "--plan", plan, "--run", str(run), "--log-samples")
    while True:
        command = Command(*command_line, "--save-every", "3", "--steps", str(steps), cwd=folder)
        try:
            if struck < kills and strike(command, run, generator):
                struck += 1
                # Who was killed may not have been needed any more: then it trains on to its end, and prints.
                command.end(PATIENCE_SECONDS + steps)
                continue
            code, _, err = command.end(PATIENCE_SECONDS + steps)
            assert code == 0, err
            return run, struck
        finally:
            command.close()


def strike(command: Command, run: Path, generator: random.Random) -> bool:
    """Kills the command or one of its training processes a random time after its first steps."""
    begun, until = steps_in(run), time.monotonic() + PATIENCE_SECONDS
    while steps_in(run) <= begun + STEPS_BETWEEN:
        if command.process.poll() is not None:
            return False
        assert time.monotonic() < until
        time.sleep(0.01)
    time.sleep(generator.random() * 0.3)
    victims = command.members()
    whom = victims if generator.random() < 0.5 else [generator.choice(victims)]
    send(whom, signal.SIGKILL)
    return bool(whom)


@pytest.mark.parametrize(
    ("plan", "kills"), [("replicate=2", 4), ("pipeline=2,microbatches=2", 1), ("engine=deepspeed,shard=2", 1)]
)
def test_a_training_that_is_killed_ends_as_one_that_is_not(tmp_path: Path, plan: str, kills: int) -> None:
    if "deepspeed" in plan:
        pytest.importorskip("deepspeed")
    generator = random.Random(time.time_ns() if SOAK else 7)
    kills, plan = KILLS or kills, f"{plan},threads=1,workers=0,device=cpu"
    steps = 20 * (kills + 1)
    for name in ("quiet", "killed"):
        (tmp_path / name).mkdir()
    quiet, _ = train(tmp_path / "quiet", 0, steps, plan, generator)
    killed, struck = train(tmp_path / "killed", kills, steps, plan, generator)
    assert struck > 0
    one, other = Run(quiet).latest(), Run(killed).latest()
    assert one.step == other.step == steps
    ours, theirs = one.read_tensors(), other.read_tensors()
    assert set(ours) == set(theirs)
    for name in ours:
        assert torch.equal(ours.read(name), theirs.read(name)), name
    losses = [[(line["step"], line["loss"]) for line in Run(run).records("step")] for run in (quiet, killed)]
    assert losses[0] == losses[1]
    for rank in (0, 1):
        assert (quiet / f"samples/rank-{rank}.jsonl").read_text() == (killed / f"samples/rank-{rank}.jsonl").read_text()
