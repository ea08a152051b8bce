"""Text as people write it: durations, numbers with commas; and the docstrings of fields."""

import dataclasses

import pytest

from grappe.errors import UsageError
from grappe.fields import docs, seconds, whole_numbers, with_variables
from grappe.plan import Plan
from grappe.training.options import Options


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("90", 90), ("90s", 90), ("1.5m", 90), (".5h", 1800), ("2h", 7200), ("1d", 86400), ("30 m", 1800),
        ("05:00", 300), ("02:30:00", 9000), ("1-00:00:01", 86401),
        ("0-12:00", 43200), ("1-06:30", 109800), ("1-12", 129600),  # behind days hours come next, as in Slurm
    ],
)  # fmt: skip
def test_what_people_write(text: str, wanted: float) -> None:
    assert seconds(text, "--time-limit") == wanted


@pytest.mark.parametrize("text", ["", "0", "-5", "5 minutes", "1:2:3:4", "nan", "inf", "1e3", "٣", "0:00", "9" * 5000])
def test_what_says_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--time-limit=.*give seconds"):
        seconds(text, "--time-limit")


@pytest.mark.parametrize(("text", "least", "wanted"), [("32,64", 1, (32, 64)), ("0, 3", 0, (0, 3)), ("", 1, ())])
def test_numbers_with_commas(text: str, least: int, wanted: tuple[int, ...]) -> None:
    assert whole_numbers(text, "--gpus", least) == wanted


@pytest.mark.parametrize("text", ["0", "two", "1,-2", "1.5", "1 2", "9" * 5000])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"--gpus={text}: give whole numbers from 1, with commas between"):
        whole_numbers(text, "--gpus")


def test_each_option_of_a_training_and_each_key_of_a_plan_says_what_it_is() -> None:
    for one in (Options, Plan):
        assert list(docs(one)) == [field.name for field in dataclasses.fields(one)]


def test_variables_are_expanded_and_an_empty_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "/a b")
    monkeypatch.setenv("EMPTY", "")
    assert with_variables("$HERE/${HERE}x$") == "/a b//a bx$"
    for text in ("$EMPTY/x", "${NOT_SET_AT_ALL}"):
        with pytest.raises(UsageError, match="is empty on this machine"):
            with_variables(text)
