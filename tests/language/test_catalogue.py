"""Translations of messages."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from grappe.language import catalogue, catalogue_of, translated
from grappe.language.catalogue import LONGEST, Catalogue, encodable, read

COMPILED = Path(catalogue.__file__).with_name("fr.mo")

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
        ("unknown. it is damaged", "unknown. il est endommagé"),
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
    ("english", "french"),
    [
        ("step 3: no such run", "step 3: no such run"),
        ("step 3 has no log", "step 3 n'a pas de journal"),
        ("grappe: step 3: the file is empty", "grappe : step 3 : le fichier est vide"),
        ("--from step 3: step 3 is float32", "--from step 3 : step 3 est float32"),
        ("digits: lr=step 3 is not a number", "digits : lr=step 3 n'est pas un nombre"),
        ("the first step's/the home folder has no line", "the first step's/the home folder n'a pas de ligne"),
    ],
)
def test_names_that_users_chose_stay(english: str, french: str) -> None:
    assert catalogue_of("fr").message(english) == french


def test_a_small_template_is_found_where_it_is_meant() -> None:
    assert (
        catalogue_of("fr").message("process 1 waits in step 3, at my.py, line 3")
        == "le processus 1 attend dans pas 3, à my.py, ligne 3"
    )


@pytest.mark.parametrize(
    ("english", "french"),
    [
        ("ValueError: unknown. it is damaged", "ValueError: unknown. it is damaged"),
        ("ValueError: step 3 is no folder", "ValueError: step 3 is no folder"),
        (
            "grappe: digits.loss() failed: RuntimeError: the file is empty; it is damaged",
            "grappe : digits.loss() a échoué : RuntimeError: the file is empty; it is damaged",
        ),
        (
            "ValueError: it is damaged (a bug in grappe: --debug shows more)",
            "ValueError : it is damaged (une erreur dans grappe : --debug en montre plus)",
        ),
        ("sbatch: error: x, the file is empty", "sbatch: error: x, the file is empty"),
        (
            "sbatch: error: step 3: the file is empty\nthe file is empty",
            "sbatch: error: step 3: the file is empty\nle fichier est vide",
        ),
    ],
)
def test_what_others_say_stays(english: str, french: str) -> None:
    assert catalogue_of("fr").message(english) == french


@pytest.mark.parametrize("content", [None, b"", b"no catalogue", b"\xde\x12\x04\x95\x00\x00", "cut off"])
def test_a_file_that_is_not_whole_gives_english(
    content: bytes | str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = COMPILED.read_bytes()
    monkeypatch.setattr("grappe.language.catalogue.__file__", str(tmp_path / "catalogue.py"))
    if content is not None:
        (tmp_path / "fr.mo").write_bytes(whole[: len(whole) // 2] if content == "cut off" else content)
    assert read("fr", "utf-8").message("the file is empty") == "the file is empty"


def test_a_damaged_entry_is_passed_over() -> None:
    damaged = Catalogue({"no run {name": "x", "no {run}": "pas de {run", "it is damaged": "il est endommagé"})
    assert damaged.message("it is damaged") == "il est endommagé"
    assert damaged.message("no run here") == "no run here"


def test_grappe_in_a_zip_speaks_english(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for file in COMPILED.parents[1].rglob("*"):
            if file.suffix in (".py", ".mo"):
                archive.write(file, file.relative_to(COMPILED.parents[2]))
    program = "from grappe.language import translated; print(translated('the file is empty'))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "all.zip"), "GRAPPE_LANG": "fr"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("the file is empty\n", "")


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
