"""The expected end of a training: right at any steady pace, said once in a long training, and not in a short one."""

import dataclasses
import os
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grappe.launch.terminal import UserStream
from grappe.step.scores import Scores
from grappe.training.options import occasions_left
from grappe.training.watchers.base import RunInfo
from grappe.training.watchers.console import Console
from grappe.training.watchers.expected_end import ExpectedEnd, span
from tests.training.watchers.made_up import INFO, record

SCORES = Scores(loss=1.0, metrics={}, count=8.0, samples=8)
MIDNIGHT = time.mktime((2027, 1, 15, 0, 0, 0, 0, 0, -1))


@dataclasses.dataclass
class Trained:
    """A training of steady steps, by a clock of its own."""

    lines: dict[int, str]
    ends: dict[int, str]
    finished: float


def training(info: RunInfo, step: float, evaluation: float = 0.0, **options: object) -> Trained:
    now = MIDNIGHT
    every = options.pop("every", info.steps_per_epoch)
    assert every is None or isinstance(every, int)
    end = ExpectedEnd(every, clock=lambda: now, **options)  # type: ignore[arg-type]
    end.started(info)
    found = Trained({}, {}, 0.0)
    for number in range(info.start + 1, info.last_step + 1):
        now += step
        if (line := end.stepped(number)) is not None:
            found.lines[number] = line
        if every and (number % every == 0 or number == info.last_step):
            now += evaluation
            if suffix := end.evaluated(number):
                found.ends[number] = suffix
    found.finished = now
    return found


def info(start: int = 0, last: int = 1000, **changes: int) -> RunInfo:
    return dataclasses.replace(
        INFO, start=start, last_step=last, **{"total_steps": last, "steps_per_epoch": 50, **changes}
    )


def minute(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def around(at: float) -> list[str]:
    """The minute of a time that was summed up in another order."""
    return [minute(at - 1e-3), minute(at + 1e-3)]


@given(step=st.integers(0, 400), more=st.integers(1, 400), every=st.none() | st.integers(1, 90))
def test_evaluations_are_counted_as_a_training_makes_them(step: int, more: int, every: int | None) -> None:
    last = step + more
    made = [one for one in range(step + 1, last + 1) if every and (one % every == 0 or one == last)]
    assert occasions_left(step, last, every) == len(made)


@given(
    start=st.integers(0, 500), steps=st.integers(200, 600), step=st.floats(1.0, 30.0), evaluation=st.floats(0.0, 300.0)
)
@example(start=135, steps=200, step=1.0, evaluation=21.0)  # the line comes with a step that is evaluated after it
def test_a_steady_training_ends_when_it_is_said(start: int, steps: int, step: float, evaluation: float) -> None:
    """Also of a resumed one, whose earlier steps are not counted. Each line after an evaluation has the end."""
    found = training(info(start, start + steps), step, evaluation)
    (line,) = found.lines.values()
    if "evaluations included" in line:
        assert any(one in line for one in around(found.finished))
    for text in found.ends.values():
        assert text.endswith(tuple(one[11:] for one in around(found.finished)))


@given(step=st.floats(0.001, 0.5), steps=st.integers(1, 240))
def test_a_short_training_says_nothing(step: float, steps: int) -> None:
    found = training(info(0, steps), step)
    assert not found.lines and not found.ends


def test_it_is_said_after_a_minute_and_with_each_evaluation_from_then_on() -> None:
    found = training(info(), step=1.0, evaluation=10.0)
    assert list(found.lines) == [65]  # behind those that warm up, and one evaluation, which is no step
    assert found.lines[65] == f"expected end: {minute(found.finished)} (in 19 min; evaluations included)"
    assert list(found.ends) == list(range(100, 1000, 50))
    assert found.ends[500] == f"  end {minute(found.finished)[11:]}"


def test_another_day_is_named() -> None:
    found = training(info(last=200), step=850.0)
    first, last = found.ends[50], found.ends[150]
    assert first == f"  end {minute(found.finished)}" and last == f"  end {minute(found.finished)[11:]}"


@pytest.mark.parametrize(
    ("last", "options", "says"),
    [
        (1000, {"every": None}, " (in 16 min)"),
        (1000, {"every": 900}, "in 16 min; evaluations not, as none was measured yet)"),
        (1000, {"stops_early": True}, "evaluations included; early stopping may come before)"),
        (500, {}, "expected end of step 500: "),
        (1000, {"deadline": MIDNIGHT + 600.0}, f"; the time limit ends it before, {minute(MIDNIGHT + 600)}: it saves"),
    ],
)  # fmt: skip
def test_what_may_end_it_otherwise_is_said(last: int, options: dict, says: str) -> None:
    (line,) = training(info(last=last, total_steps=1000), 1.0, **options).lines.values()
    assert says in line


def test_a_later_time_limit_is_not_named() -> None:
    (line,) = training(info(), 1.0, deadline=MIDNIGHT + 9000.0).lines.values()
    assert "time limit" not in line


@pytest.mark.parametrize(
    ("seconds", "text"), [(3, "1 min"), (2000, "33 min"), (7800, "2 h 10 min"), (86400 * 3 + 4 * 3600, "3 d 4 h")]
)
def test_times_to_come(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_the_console_shows_it_in_a_pipe() -> None:
    now = MIDNIGHT
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        console = Console(UserStream(stream), end=ExpectedEnd(50, clock=lambda: now))
        console.started(info())
        for number in range(1, 101):
            now += 1.0
            console.stepped(record(number, 1.0))
            if number % 50 == 0:
                console.evaluated(number, SCORES)
    with os.fdopen(reader) as pipe:
        lines = pipe.read().splitlines()
    end = minute(MIDNIGHT + 1000)
    assert lines[1] == f"expected end: {end} (in 16 min; evaluations included)"
    assert lines[2].endswith(f"12 samples/s  end {end[11:]}") and "end" not in lines[0]
