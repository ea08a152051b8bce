"""Sharding: what fully_shard keeps at each mark, counted by hand for two units of one matrix each."""

import pytest

from grappe.foresight.memory import GLOO, GLOO_LATE, NCCL, CommunicationBuffers, FsdpMemory, Parameter
from grappe.foresight.trace import Mark

FORWARDS = [("forward", 0), ("left", 0), ("forward", 1), ("left", 1), ("left", -1)]
UNITS = [Parameter(name=f"{unit}.weight", shape=(4, 1), item=25, trained=True, unit=unit) for unit in (0, 1)]
"""Of 100 bytes."""


def most(kinds: list[tuple[str, int]], copies: CommunicationBuffers, **options: object) -> list[int]:
    """Bytes that are taken at most at each mark."""
    given = {"there": False, "reduces": True, **options}
    zero = given.pop("zero", 3)
    overlay = FsdpMemory(UNITS, 2, zero, copies=copies, **given)  # type: ignore[arg-type]
    return [overlay.at(Mark(kind, which, 0, 0)) for kind, which in kinds]


@pytest.mark.parametrize("copies", [NCCL, GLOO, GLOO_LATE])
def test_a_unit_is_gathered_into_a_buffer_which_stays_until_the_next(copies: CommunicationBuffers) -> None:
    marks = [("start", -1), ("forward", 0), ("left", 0), ("forward", 1)]
    # The buffer before, the new one, and gloo's copy of it; then the new one, and the parameters.
    assert most(marks, copies) == [0, 200, 200, 300 if copies.takes else 200]


def test_zero_3_frees_a_unit_behind_its_forward_and_zero_2_keeps_it() -> None:
    marks = [*FORWARDS, ("loss", -1)]
    assert most(marks, NCCL)[-1] == 0
    assert most(marks, NCCL, zero=2)[-1] == 200


def test_a_reduction_takes_its_input_its_output_and_with_gloo_a_copy() -> None:
    marks = [*FORWARDS, ("backward", 1), ("gradient", 1), ("done", 1), ("loss", -1)]
    # Ahead, unit 0 is gathered: 100 more. The gradient (100) is copied into the input (100), then freed.
    assert most(marks, NCCL)[-2:] == [300, 250]
    assert most(marks, GLOO)[-2:] == [350, 250]
    # The copy is there yet; and before, what unit 1 was gathered into.
    assert most(marks, GLOO_LATE)[-2:] == [450, 350]


def test_one_of_gloos_threads_has_its_copy_yet_while_the_other_makes_one() -> None:
    marks = [*FORWARDS, ("backward", 1)]
    # Unit 1's parameters, what unit 0 is gathered into ahead, and the copy of that.
    assert most(marks, GLOO)[-1] == 300
    assert most(marks, GLOO_LATE)[-1] == 400  # and what unit 1 was gathered into


def test_a_unit_that_is_called_twice_is_gathered_twice_and_reduced_once() -> None:
    calls = [(kind, unit) for unit in (0, 1, 0) for kind in ("forward", "left")]
    back = [(kind, 0) for kind in ("backward", "done")]
    marks = [*calls, ("left", -1), *back, ("backward", 1), ("gradient", 1), ("done", 1)]
    overlay = FsdpMemory(UNITS, 2, 3, there=False, reduces=True, copies=NCCL)
    for kind, which in [*marks, ("backward", 0), ("gradient", 0)]:
        overlay.at(Mark(kind, which, 0, 0))
    assert overlay.now == 100 + 100 + 100 + 50  # its parameters, its gradient; unit 1's input and half of gradients
    overlay.at(Mark("done", 0, 0, 0))
    overlay.at(Mark("end", -1, 0, 0))
    assert overlay.now == 100  # both halves


def test_microbatches_under_zero_1_keep_whole_gradients() -> None:
    marks = [("forward", 1), ("backward", 1), ("gradient", 1), ("done", 1), ("end", -1)]
    kept = FsdpMemory(UNITS, 2, 1, there=False, reduces=False, copies=GLOO)
    for kind, which in marks:
        kept.at(Mark(kind, which, 0, 0))
    assert kept.now == 100
    assert FsdpMemory(UNITS, 2, 1, there=True, reduces=True, copies=GLOO).now == 200
    assert FsdpMemory(UNITS, 2, 2, there=True, reduces=True, copies=GLOO).now == 100  # their halves
