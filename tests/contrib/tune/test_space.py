"""Ranges and values, read_space from text; what is wrong is refused, naming the field."""

import pytest

from grappe.contrib.tune.space import Choices, Range, as_texts, read_space
from grappe.errors import UsageError
from tests.contrib.tune.line import Line


def test_ranges_values_and_fixed_fields() -> None:
    texts = {"lr": "1e-3..1:log", "width": "1..8", "batch_size": "8|16", "epochs": "2", "how": "well"}
    space, fixed = read_space(Line, texts)
    assert space == {
        "lr": Range(low=0.001, high=1.0, log=True),
        "width": Range(low=1, high=8, integer=True),
        "batch_size": Choices(texts=("8", "16")),
    }
    assert fixed == {"epochs": "2", "how": "well"}
    commas = {"batch_size": "8, 16", "lr": "0.1,0.2", "how": "well,nan"}
    assert {name: str(axis) for name, axis in read_space(Line, commas)[0].items()} == {
        "batch_size": "8|16", "lr": "0.1|0.2", "how": "well|nan"
    }  # fmt: skip
    assert read_space(Line, {"while_there": "a,b", "lr": "0.1,0.2"})[1] == {"while_there": "a,b"}  # a text's own comma
    assert read_space(Line, {name: str(axis) for name, axis in space.items()})[0] == space


@pytest.mark.parametrize(
    ("field", "text", "told"),
    [
        ("lrr", "0.1..1", "did you mean lr?"),
        ("lr", "1..0.1", "lr=1..0.1: the range is upside down"),
        ("lr", "1..1", "upside down"),
        ("lr", "0..1:log", "a logarithmic range is above 0"),
        ("lr", "0.1..1:lin", "after the range there can only be :log"),
        ("lr", "0.1..inf", "two finite ends"),
        ("lr", "0.1..1..2", "two finite ends"),
        ("lr", "0.1..", "an empty end is not a number"),
        ("width", "1.5..3", "width=1.5..3: 1.5 is not a whole number"),
        ("width", f"1..{10**400}", "a whole number below 2^63"),
        ("batch_size", "8|x", "x is not a whole number"),
        ("batch_size", "8,16,", "an empty value is not a whole number"),
        ("batch_size", "8|8", "a value is given twice"),
        ("how", "well|badly", "badly is not one of well, nan"),
        ("lr", "0.1", "nothing is searched"),
    ],
)
def test_what_is_wrong_is_refused(field: str, text: str, told: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_space(Line, {field: text})
    assert told in str(refused.value)


def test_values_from_python() -> None:
    texts = as_texts({"lr": "0.1..1", "width": [1, 2], "clip": [None, 0.5]})
    assert texts == {"lr": "0.1..1", "width": "1|2", "clip": "none|0.5"}
    with pytest.raises(UsageError, match="how: a value"):
        as_texts({"how": ["a|b"]})


def test_a_number_is_short_and_stays_in_its_range() -> None:
    axis = Range(low=1 / 3, high=2 / 3)
    assert axis.text(0.123456789 + 0.4) == "0.523457"
    assert float(axis.text(1 / 3)) >= axis.low
    assert float(axis.text(2 / 3)) <= axis.high
    whole = Range(low=1, high=4, integer=True, log=True)
    assert {whole.text(value) for value in range(1, 5)} == {"1", "2", "3", "4"}
