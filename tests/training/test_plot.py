"""Plots of curves: valid SVG of any records, foreign text escaped, of a bounded size."""

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from grappe.training.plot import DETAIL, Plot

HOSTILE = "</svg><script>alert(1)</script>\x1b"


def step(number: int, loss: object, **more: object) -> dict[str, object]:
    return {"kind": "step", "step": number, "epoch": 0, "samples": 1, "loss": loss, "lr": 0.1, **more}


def evaluation(number: int, **scores: object) -> dict[str, object]:
    return {"kind": "evaluation", "step": number, "samples": 4, "count": 4.0, **scores}


@pytest.mark.parametrize(
    "records",
    [
        [step(1, 0.5)],
        [step(1, 0.0), step(2, 0.0)],
        [step(number, 10.0**-number) for number in range(1, 9)],
        [step(1, 1e-320), step(2, -1e29), step(3, None), step(4, math.nan), step(5, 10**400), step(6, "x")],
        [step(1, 1.0), evaluation(1, loss=0.9, accuracy=0.5, f1=0.1, recall=0.2, split=HOSTILE, **{HOSTILE: 1.0})],
        [step(2**80, 1.0), step(-5, 2.0), {"kind": "step"}, {"kind": []}, {}],
    ],
)
def test_any_records_make_a_valid_picture(records: list, tmp_path: Path) -> None:
    plot = Plot(records)
    root = ElementTree.fromstring(plot.svg())
    assert root.findall(".//{*}polyline") and not root.findall(".//{*}script")
    numbers = [float(x) for line in root.iter("{*}polyline") for x in line.get("points", "").replace(",", " ").split()]
    assert all(map(math.isfinite, numbers))
    plot.save(tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").read_text() == plot.svg()


def test_lines_are_thinned_and_a_resumed_run_replaces_its_end() -> None:
    long = Plot(step(number, 1 / number) for number in range(1, 100_000))
    assert len(long.svg()) < 50 * DETAIL
    again = Plot([step(1, 1.0), step(2, 2.0), step(3, 3.0), step(2, 5.0)])
    assert again.svg() == Plot([step(1, 1.0), step(2, 5.0)]).svg()
    assert Plot().svg() == ""
    assert 'end">-1<' in Plot([step(1, 0.0)]).svg()  # and no ticks of 1e-09


def test_training_and_validation_of_a_metric_are_in_one_panel() -> None:
    plot = Plot([step(1, 1.0), evaluation(1, loss=0.9, accuracy=0.5, training_accuracy=0.6)])
    assert repr(plot) == "Plot('loss', 'accuracy')"
    assert plot.svg().count(">training</tspan>") == plot.svg().count(">validation</tspan>") == 2
