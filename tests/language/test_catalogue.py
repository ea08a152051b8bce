"""Translations of messages."""

from __future__ import annotations

import pytest

from grappe.language import catalogue_of, translated
from grappe.language.catalogue import LONGEST, Catalogue, encodable

SMALL = Catalogue(
    {
        "{what} has no '{name}': {nearest}": "{what} n'a pas '{name}' : {nearest}",
        "grappe: {error}": "grappe : {error}",
        "grappe: {folder}: {problem}": "grappe : {folder} : {problem}",
        "did you mean {close}?": "vouliez-vous dire {close} ?",
        "the plan": "le plan",
        "it is damaged": "il est endommagé",
        "The first. And it ends": "Le premier. Et il finit",
        " or ": " ou ",
    }
)


@pytest.mark.parametrize(
    ("english", "french"),
    [
        ("grappe: it is damaged", "grappe : il est endommagé"),
        ("grappe: runs/a: it is damaged", "grappe : runs/a : il est endommagé"),
        (
            "grappe: the plan has no 'x': did you mean a or b?",
            "grappe : le plan n'a pas 'x' : vouliez-vous dire a ou b ?",
        ),
        ("ValueError: unknown. it is damaged", "ValueError: unknown. il est endommagé"),
        ("it is damaged; nobody knows this", "il est endommagé; nobody knows this"),
        ("nobody knows this", "nobody knows this"),
        ("", ""),
    ],
)
def test_messages_within_messages(english: str, french: str) -> None:
    assert SMALL.message(english) == french


def test_a_name_is_no_message() -> None:
    assert SMALL.message("the plan has no 'the plan': x") == "le plan n'a pas 'the plan' : x"


@pytest.mark.parametrize(
    "value", ["{name}", "{0.__class__}", "%s", "\x1b[31m", "{", "}}", "{{}}", "it is damaged"]
)
def test_foreign_values_stay_as_they_are(value: str) -> None:
    assert SMALL.message(f"grappe: the plan has no '{value}': x") == f"grappe : le plan n'a pas '{value}' : x"


@pytest.mark.parametrize(
    "text", ["a: b; c. d, " * 3000, "a: b; c. d, " * 1500, "grappe: " * 2000, "'" * 9000]
)
def test_hostile_texts_end(text: str) -> None:
    """Within a test's time; a text that is longer than any message is left alone."""
    found = catalogue_of("fr").message(text)
    assert len(text) <= LONGEST or found == text


def test_letters_that_a_terminal_lacks() -> None:
    assert encodable("nœud, tâche…", "utf-8") == "nœud, tâche…"
    assert encodable("nœud, tâche…", "latin-1") == "noeud, tâche..."
    assert encodable("nœud, tâche…", "ascii") == "noeud, tache..."
    assert encodable("nœud", "no such encoding") == "noeud"


def test_english_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "grappe: ended at once; what was saved before is kept"
    assert translated(text) is text
    monkeypatch.setenv("GRAPPE_LANG", "fr")
    assert translated(text) == "grappe : terminé aussitôt ; ce qui était déjà sauvegardé reste"
