"""Foreign text is shown and never obeyed: by a terminal, a spreadsheet, a page."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grappe.errors.foreign_text import html_text, number, printable, printable_lines, spreadsheet_cell

TITLE, CLIPBOARD, CLEAR = "\x1b]0;owned\x07", "\x1b]52;c;Y3VybA==\x07", "\x1b[2J\x1b[H"
HOSTILE = {
    **{text: text for text in ("précision 0,5 – été", "精度", "[bold]not markup[/]", ":smile:", "e\u0301")},
    TITLE: r"\x1b]0;owned\x07",
    CLIPBOARD: r"\x1b]52;c;Y3VybA==\x07",
    CLEAR: r"\x1b[2J\x1b[H",
    "\x9b31m": r"\x9b31m",  # the same as escape and [, in one character
    "a\u202egnp.exe": r"a\u202egnp.exe",
    "a\u200bb\u2066c": r"a\u200bb\u2066c",
    "a\U000e0041\U000e0142b\ufe0f": r"a\U000e0041\U000e0142b\ufe0f",  # text hidden in tags and variation selectors
    "one\ntwo\rthree\tfour": r"one\ntwo\rthree\tfour",
    "line\u2028line\x85line": r"line\u2028line\x85line",
    "not utf-8: \udcff": r"not utf-8: \udcff",
    "\u3164": r"\u3164",
}


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_terminal_obeys_is_shown(text: str) -> None:
    assert printable(text) == HOSTILE[text]
    assert text != HOSTILE[text] or printable_lines(text) == text


@given(st.text(st.characters(codec=None)))
def test_any_text_becomes_one_visible_line(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    shown.encode()
    assert printable(shown) == shown
    lines = printable_lines(text)
    assert lines.replace("\n", "").replace("\t", "").isprintable()
    assert printable_lines(lines) == lines


def test_a_flood_is_cut() -> None:
    assert len(printable("x" * 10**6)) < 2100
    assert len(printable_lines("x\n" * 10**6)) < 60_000


def test_lines_keep_their_breaks_and_lose_their_colours() -> None:
    assert printable_lines("\x1b[31ma\x1b[0m\r\nb\rc\td\x1b[2J") == "a\nb\nc\td\\x1b[2J"


def test_what_cannot_be_written_down() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert printable(deep) == "…"
    assert printable(10**5000) == "…"
    while deep:  # freed by hand: freeing it at once would overflow the stack of some Pythons
        deep = deep[0]  # type: ignore[assignment]


@pytest.mark.parametrize("sign", list("=+-@＝＋－＠"))
def test_a_spreadsheet_sees_no_formula(sign: str) -> None:
    for text in (f"{sign}1+1", f"  {sign}cmd|' /C calc'!A0", f"a;{sign}1", f"a,{sign}1", f"a|{sign}1"):
        assert spreadsheet_cell(text) in (text.replace(sign, f"'{sign}", 1), text.replace(f"  {sign}", f"'  {sign}"),
                                          text.replace(f"{sign}cmd|", f"'{sign}cmd|"))  # fmt: skip
    assert spreadsheet_cell(f"\t{sign}1") == f"\\t{sign}1"
    assert spreadsheet_cell(f"\r{sign}1") == f"\\r{sign}1"


@given(st.text())
def test_no_cell_begins_with_a_sign(text: str) -> None:
    cell = spreadsheet_cell(text)
    assert cell.lstrip()[:1] not in list("=+-@\t\r\n＝＋－＠")
    assert all(part.lstrip()[:1] not in list("=+-@") for part in cell.split(";"))


def test_numbers_stay_numbers() -> None:
    assert [spreadsheet_cell(one) for one in (-0.5, 3, None, True, -math.inf)] == [-0.5, 3, None, True, -math.inf]
    assert math.isnan(spreadsheet_cell(math.nan))
    assert spreadsheet_cell([-0.5, 0.25]) == "-0.5 0.25"
    assert spreadsheet_cell(["=1", 2]) == "'=1 2"
    assert spreadsheet_cell(10**5000) == "…"
    assert spreadsheet_cell({"=1": 2}) == "{'=1': 2}"


def test_html_is_text() -> None:
    assert html_text("<script>\x1b'\"") == "&lt;script&gt;\\x1b&#x27;&quot;"


@pytest.mark.parametrize("found", ["1", None, [], math.nan, math.inf, 10**400, -(10**400), {}, 0, 3, -2.5])
def test_what_is_no_number_counts_as_zero(found: object) -> None:
    assert number(found) == (found if found in (0, 3, -2.5) else 0.0)
