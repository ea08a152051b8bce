"""Ten forms of public scripts by grappe.Loop: one process's numbers, and no more lines than Accelerate's."""

import re
from typing import Any

import pytest

from grappe.training.own_loop_world import PLAN
from tests.processes import Pool
from tests.training.script_forms import FORMS, lines_changed

NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


@pytest.mark.parametrize("name", FORMS)
def test_a_form_prints_on_several_processes_what_it_does_on_one(pool: Pool, name: str) -> None:
    alone, *several = (
        pool.run("tests.training.loops:printed", processes, FORMS[name].text("grappe"), f"replicate={processes}")[0]
        for processes in (1, 2, 3)
    )
    assert len(alone) >= 2
    for lines in several:
        for line, other in zip(alone, lines, strict=True):
            numbers, others = (list(map(float, NUMBER.findall(text))) for text in (line, other))
            assert numbers
            assert others == pytest.approx(numbers, rel=1e-5)


@pytest.mark.parametrize("name", FORMS)
def test_a_form_needs_no_more_lines_than_with_accelerate(name: str) -> None:
    plain, theirs, ours = (FORMS[name].text(library) for library in ("", "accelerate", "grappe"))
    assert lines_changed(plain, ours) <= lines_changed(plain, theirs)


@pytest.mark.parametrize("library", ["", "accelerate", "grappe"])
@pytest.mark.parametrize("name", FORMS)
def test_a_form_runs(
    name: str, library: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLAN, "threads=1")  # the plan of all loops in the tests' process
    if library == "accelerate":
        pytest.importorskip(library)
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(FORMS[name].text(library), name, "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 2
    if library == "grappe":
        names["loop"]._close_at_exit()
        if "loop.batches" not in FORMS[name].text(library):  # nothing is drawn in another order
            exec(compile(FORMS[name].text(), name, "exec"), {"__name__": "script"})
            assert capsys.readouterr().out.splitlines() == lines
