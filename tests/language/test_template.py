"""Templates of messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grappe.language.template import Template, pieces

WORDS = st.text(st.sampled_from("ab {}'é\n"), max_size=12)


def test_a_message_gives_its_values() -> None:
    template = Template.of("plan: {name}={text} is not {what}", "plan : {name}={text} n'est pas {what}")
    assert template.values("plan: a=b is not a number") == ["a", "b", "a number"]
    assert template.filled(["a", "b", "un nombre"]) == "plan : a=b n'est pas un nombre"
    assert template.values("plan: a=b is a number") is None
    assert template.values("the plan: a=b is not 1") is None


def test_the_ends_do_not_overlap() -> None:
    assert Template.of("a{x}a", "").values("a") is None
    assert Template.of("a{x}a", "").values("aa") == [""]
    assert Template.of("abc", "").values("abc") == []
    assert Template.of("abc", "").values("abcabc") is None


def test_a_value_in_quotation_marks_is_a_name() -> None:
    assert Template.of("no '{a}' in {b}, `{c}`", "").kept == {0, 2}


def test_a_value_that_a_user_typed_is_a_name() -> None:
    template = Template.of("{what}: {key}={shown} or --to {place}: {error} and {file2}", "")
    assert template.kept == {1, 2, 3, 5}


def test_one_name_has_one_value() -> None:
    template = Template.of("{a} of {b}, not {a}", "{a} de {b}, non {a}")
    assert template.values("1 of 2, not 1") == ["1", "2", "1"]
    assert template.values("1 of 2, not 3") is None


def test_a_number_is_one_word() -> None:
    assert Template.of("step {step}", "").values("step 3") == ["3"]
    assert Template.of("step {step}", "").values("step 3 is no folder") is None


def test_doubled_braces_are_braces() -> None:
    template = Template.of("write {{…}} into {file}", "écrivez {{…}} dans {file}")
    assert template.values("write {…} into x") == ["x"]
    assert template.filled(["{0.__class__}"]) == "écrivez {…} dans {0.__class__}"


def test_a_brace_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="Single '}'"):
        pieces("a } b")


@given(st.lists(WORDS, min_size=1, max_size=4), st.lists(WORDS, min_size=3, max_size=3))
def test_what_a_template_made_matches_it(texts: list[str], values: list[str]) -> None:
    doubled = [one.replace("{", "{{").replace("}", "}}") for one in texts]
    template = doubled[0] + "".join(f"{{x{i}}}{one}" for i, one in enumerate(doubled[1:]))
    message = texts[0] + "".join(value + one for value, one in zip(values, texts[1:], strict=False))
    found = Template.of(template, template)
    given_values = found.values(message)
    assert given_values is not None
    assert found.filled(given_values) == message
