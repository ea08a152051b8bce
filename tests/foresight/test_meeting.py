"""Processes wait for each other through a file in memory."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from grappe.foresight import meeting
from grappe.foresight.meeting import Meeting
from grappe.launch.rank import ProcessRank


def both(folder: Path) -> list[Meeting]:
    return [Meeting(ProcessRank(rank=rank, size=2), folder) for rank in range(2)]


def test_nobody_goes_on_before_all_are_there(tmp_path: Path) -> None:
    first, second = both(tmp_path)
    passed: list[int] = []
    waiting = threading.Thread(target=lambda: (first.wait(), passed.append(1)))
    waiting.start()
    time.sleep(0.05)
    assert not passed
    second.wait()
    waiting.join(timeout=30)
    assert passed == [1]


def test_each_meeting_is_one_of_its_own(tmp_path: Path) -> None:
    first, second = both(tmp_path)
    ahead: list[int] = []

    def three_times() -> None:
        for number in range(3):
            first.wait()
            ahead.append(number)

    waiting = threading.Thread(target=three_times)
    waiting.start()
    for number in range(3):
        assert len(ahead) <= number
        second.wait()
    waiting.join(timeout=30)
    assert ahead == [0, 1, 2]


def test_all_get_the_number_of_process_0(tmp_path: Path) -> None:
    first, second = both(tmp_path)
    found: list[int] = []
    other = threading.Thread(target=lambda: found.append(second.agreed(99)))
    other.start()
    assert first.agreed(7) == 7
    other.join(timeout=30)
    assert found == [7]


def test_a_process_that_died_is_not_waited_for_forever(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(meeting, "PATIENCE_SECONDS", 0.05)
    both(tmp_path)[0].wait()


def test_one_process_waits_for_nobody(tmp_path: Path) -> None:
    assert Meeting(ProcessRank(), tmp_path).agreed(3) == 3
