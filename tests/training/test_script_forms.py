"""Ten forms of public scripts by grappe.Loop: one process's numbers, at most six lines more than Accelerate's."""

import re
from typing import Any

import pytest

from grappe.plan import Plan
from tests.processes import Pool
from tests.training.script_forms import FORMS, lines_changed

NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


@pytest.mark.parametrize("name", FORMS)
def test_a_form_prints_on_two_processes_what_it_does_on_one(pool: Pool, name: str) -> None:
    form = FORMS[name]
    (alone, one), (several, two) = (
        pool.run("tests.training.loops:printed", Plan.parse(plan).processes, form.text("grappe"), plan)[0]
        for plan in (form.plan.replace("replicate=2", "replicate=1"), form.plan)
    )
    assert (one, two) == (1, 2)
    assert len(alone) == len(several) >= 2
    for line, other in zip(alone, several, strict=True):
        numbers, others = ([float(each) for each in NUMBER.findall(text)] for text in (line, other))
        assert numbers
        assert others == pytest.approx(numbers, rel=1e-5)


@pytest.mark.parametrize("name", FORMS)
def test_a_form_needs_at_most_six_lines_more_than_with_accelerate(name: str) -> None:
    plain, theirs, ours = (FORMS[name].text(library) for library in ("", "accelerate", "grappe"))
    assert lines_changed(plain, ours) <= lines_changed(plain, theirs) + 6


@pytest.mark.parametrize("library", ["", "accelerate"])
@pytest.mark.parametrize("name", FORMS)
def test_a_form_runs_as_it_is_and_with_accelerate(name: str, library: str, capsys: pytest.CaptureFixture[str]) -> None:
    if library:
        pytest.importorskip(library)
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(FORMS[name].text(library), name, "exec"), names)
    assert len(capsys.readouterr().out.splitlines()) >= 2
