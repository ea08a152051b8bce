"""SIGKILL at random instants of a process that saves in a loop: nothing that was committed is ever lost."""

import os
import random
import shutil
import signal
import struct
import time
from pathlib import Path

import torch

from grappe.checkpoint.commit import verify
from grappe.checkpoint.format import Checkpoint, Retention, latest, leftovers, list_checkpoints
from grappe.checkpoint.saver import Saver
from grappe.launch.world import ProcessRank, World

KILLS = int(os.environ.get("GRAPPE_SOAK", "40"))
KEPT = 2
LONGEST_SECONDS = 0.04  # some saves fit in
BEST = 7


def state(step: int) -> dict[str, torch.Tensor]:
    return {"model.w": torch.full((64, 32), float(step)), "optimizer.w.n": torch.tensor(step)}


def save_until_killed(folder: Path, pipe: int) -> None:
    """As a training does: tidies up, goes on from the newest, and tells each step once it is committed."""
    for entry in leftovers(folder):
        shutil.rmtree(entry, ignore_errors=True)
    newest = latest(folder)
    step = newest.step if newest is not None else 0
    world = World(process=ProcessRank(), device=torch.device("cpu"))
    saver = Saver(folder, world, f"start{os.getpid()}", Retention(last=KEPT), lambda: None)
    os.write(pipe, struct.pack("<q", step))
    while True:
        step += 1
        if saver.save(step, state(step), {}, {"validation_loss": abs(step - BEST) + 0.5}) or saver.wait():
            os._exit(1)
        os.write(pipe, struct.pack("<q", step))


def killed(folder: Path, commits: int, seconds: float) -> list[int]:
    """Starts a process, kills it so long after these commits; returns the steps that it told of."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            save_until_killed(folder, writer)
        finally:
            os._exit(1)
    os.close(writer)
    told = b"".join(os.read(reader, 8) for _ in range(1 + commits))
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    while chunk := os.read(reader, 1 << 16):
        told += chunk
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "it ended by itself: a save failed"
    return [number for (number,) in struct.iter_unpack("<q", told)]


def is_whole(checkpoint: Checkpoint) -> bool:
    wanted = state(checkpoint.step)
    tensors = checkpoint.read_tensors()
    return (
        verify(checkpoint.folder) is None
        and checkpoint.read_values()["step"] == checkpoint.step
        and set(tensors) == set(wanted)
        and all(torch.equal(tensors.read(name), tensor) for name, tensor in wanted.items())
    )


def test_nothing_committed_is_lost(tmp_path) -> None:
    generator = random.Random(20261121)
    committed: set[int] = set()
    in_the_middle = 0
    for number in range(KILLS):
        # Some get so far on the busiest machine.
        told = killed(tmp_path, int(number % 4 == 0), generator.random() * LONGEST_SECONDS)
        committed |= {*told} - {0}
        there = list_checkpoints(tmp_path)
        assert all(map(is_whole, there))
        steps = [one.step for one in there]
        # It may have been killed between a commit and telling of it, never the other way round.
        assert not committed or max(committed) <= steps[0] <= max(committed) + 1
        committed |= set(steps)
        assert set(sorted(committed)[-KEPT:]) <= set(steps)
        assert BEST not in committed or BEST in steps
        in_the_middle += bool(leftovers(tmp_path))
    assert in_the_middle  # else it was never killed while it saved, and all of this shows nothing
    assert max(committed) > BEST
    print(f"{KILLS} kills, {in_the_middle} in the middle of a save, {max(committed)} commits")
