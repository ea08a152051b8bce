"""grappe train's options about keeping and stopping, as typed."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from grappe.cli import commands
from grappe.training.options import Options
from grappe.training.run import Run
from grappe.verbs import train as verb
from tests.commands import GRAPPE, Command

TASK = f"{Path(__file__).with_name('stuck.py')}:Quick"
PLAN = ("--plan", "threads=1,workers=0,device=cpu", "--run", "run")


@pytest.fixture
def train(start: Callable[..., Command]) -> Callable[..., tuple[int, str, str]]:
    return lambda *arguments: start(GRAPPE, "train", TASK, *PLAN, *arguments).end()


def test_a_time_limit_saves_exits_75_and_the_run_goes_on(train, tmp_path: Path) -> None:
    code, out, err = train("--time-limit", "8s", "--save-every", "1000000")
    assert code == os.EX_TEMPFAIL, err
    stopped = re.search(r"interrupted, saved, (\d+) step", out)
    assert stopped, out
    step = int(stopped[1])
    assert Run(tmp_path / "run").latest().step == step > 0
    resume = out.splitlines()[-1].split()
    assert resume[:3] == ["next", "grappe", "train"] and "--run" in resume
    code, out, err = train("--steps", str(step + 3))
    assert code == 0, err
    assert f"resuming from step {step}\n" in out
    assert [one["step"] for one in Run(tmp_path / "run").records("step")] == list(range(1, step + 4))


def test_options_reach_the_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requests: list[verb.Request] = []

    def note(request: verb.Request) -> verb.Result:
        requests.append(request)
        return verb.Result(run=tmp_path, status="finished", step=1)

    monkeypatch.setattr(verb, "run_training", note)
    options = "--time-limit 2h --stall-limit 5m --keep 7 --stop-on-failed-save"
    assert commands.app(["train", "digits", *options.split()]) == 0
    wanted = Options(time_limit=7200.0, stall_limit=300.0, keep=7, stop_on_failed_save=True)
    assert requests[0].options == wanted
