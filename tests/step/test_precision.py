"""The loss scale of fp16 follows infinities and good steps, for as long as a training goes on."""

from grappe.step.precision import GROWTH_STEPS, LossScale


def test_it_doubles_after_each_two_thousand_good_steps_and_halves_after_an_infinity() -> None:
    scale = LossScale("fp16")
    first = scale.value
    for turn in (1, 2):
        for _ in range(GROWTH_STEPS - 1):
            scale.update(False)
        assert scale.value == first * 2 ** (turn - 1)
        scale.update(False)
        assert scale.value == first * 2**turn
    scale.update(True)
    assert scale.value == first * 2


def test_a_resumed_one_goes_on_counting() -> None:
    scale, resumed = LossScale("fp16"), LossScale("fp16")
    for skipped in (True, *[False] * (GROWTH_STEPS - 1)):
        scale.update(skipped)
    resumed.restore(scale.state())
    for each in (scale, resumed):
        each.update(False)
    assert scale.state() == resumed.state() == {"value": 2.0**16, "good": 0}


def test_other_precisions_have_none() -> None:
    scale = LossScale("bf16")
    scale.update(True)
    assert scale.value == 1.0
