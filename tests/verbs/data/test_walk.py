"""The line about a long walk."""

import time

from grappe.verbs.data.walk import ProgressMeter, Ticker


def test_a_line_says_how_far_it_is(monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    shown: list[str] = []
    meter = ProgressMeter("checking", 1000, shown.append)
    ticker = Ticker(shown.append)
    meter.at(1)
    ticker("soon")
    assert shown == []
    now[0] += 20
    meter.at(250, "2 bad")
    assert shown == ["checking [######                  ] 250 of 1,000 images, 12/s, 60 s left, 2 bad"]
    ticker("later")
    meter.end()
    assert shown[1:] == ["later", ""]
