"""Translations of messages."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grappe.language import catalogue, catalogue_of, translated
from grappe.language.catalogue import LONGEST, PLACES, Catalogue, Template, _Message, encodable, pieces, read

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
        ("the plan has no 'the plan': x", "le plan n'a pas 'the plan' : x"),  # a name is no message
        ("it is damaged; nobody knows this", "il est endommagé; nobody knows this"),
        ("nobody knows this", "nobody knows this"),
        ("", ""),
    ],
)
def test_messages_within_messages(english: str, french: str) -> None:
    assert SMALL.message(english) == french


@pytest.mark.parametrize("value", ["{name}", "{0.__class__}", "%s", "\x1b[31m", "{", "}}", "{{}}", "it is damaged"])
def test_foreign_values_stay_as_they_are(value: str) -> None:
    assert SMALL.message(f"grappe: the plan has no '{value}': x") == f"grappe : le plan n'a pas '{value}' : x"


@pytest.mark.parametrize(
    ("english", "french"),
    [
        ("398 MB", "398 Mo"),
        ("2 MB to 3 MB", "2 Mo à 3 Mo"),
        ("5,976 (1,283 to 6,997)", "5 976 (1 283 à 6 997)"),
        ("398 MB to 403 MB in each process", "398 Mo à 403 Mo dans chaque processus"),
        ("92.22% (166 of 180)", "92.22% (166 sur 180)"),
        ("validation accuracy", "accuracy de validation"),
        ("step-000046 (newest)", "step-000046 (le plus récent)"),
        ("same ✓", "identique ✓"),
        (
            "71 parameters, SGD(lr=0.1), inputs [32, 1, 8, 8], 23 steps an epoch",
            "71 paramètres, SGD(lr=0.1), entrées [32, 1, 8, 8], 23 pas par époque",
        ),
        ("best: trial 0, loss 0.9, runs/study-2/trial-0", "meilleur : essai 0, perte 0.9, runs/study-2/trial-0"),
        ("for runs, data, caches; 5 TB a project", "pour exécutions, données, caches ; 5 To par projet"),
    ],
)
def test_results_are_french(english: str, french: str) -> None:
    assert catalogue_of("fr").result(english) == french


@pytest.mark.parametrize(
    ("english", "french"),
    [
        # Names that users chose stay.
        ("step 3: no such run", "step 3: no such run"),
        ("step 3 has no log", "step 3 n'a pas de journal"),
        ("grappe: step 3: the file is empty", "grappe : step 3 : le fichier est vide"),
        (
            "--from step 3: there is no such run or file",
            "--from step 3 : il n'y a pas de telle exécution, ni de tel fichier",
        ),
        ("digits: lr=step 3 is not a number", "digits : lr=step 3 n'est pas un nombre"),
        ("the first step's/the home folder has no line", "the first step's/the home folder n'a pas de ligne"),
        ("process 1 waits in step 3, at my.py, line 3", "le processus 1 attend dans le pas 3, à my.py, ligne 3"),
        # Thousands have a space, but where they were typed.
        ("1,024 members", "1 024 membres"),
        ("--per-shard 1,024: it must be 1 to 1,000,000", "--per-shard 1,024 : il faut 1 à 1 000 000"),
        # Progress is French to its end.
        (
            "checking [##  ] 3 of 1,000 images, 1,200/s, 3 s left, 2 bad",
            "vérification [##  ] 3 sur 1 000 images, 1 200/s, encore 3 s, 2 mauvaises",
        ),
        (
            "fetching a b [##  ] 3 of 9 bytes, 1/s, 2 s left",
            "téléchargement de a b [##  ] 3 sur 9 octets, 1/s, encore 2 s",
        ),
        ("3 of 9: trial 2: lr=0.1: failed: it diverged", "3 sur 9 : essai 2 : lr=0.1 : échec : il a divergé"),
        ("3 of 9: trial 2: lr=0.1: accuracy 0.97", "3 sur 9 : essai 2 : lr=0.1 : accuracy 0.97"),
        (
            "study a: 3 of 9 trials ended, 1 failed, 2 stopped early, 1 running, waiting: there is none",
            "étude a : 3 essais terminés sur 9, 1 en échec, 2 arrêtés tôt, 1 en cours, en attente : il n'y en a aucun",
        ),
        # No part of a log's lines is taken for a node's name, nor `0 of 1` for a number.
        (
            "process 0 of 1 on vm ended by itself with exit code 1\n  | bad file",
            "processus 0 de 1 sur vm s'est terminé de lui-même avec le code 1\n  | bad file",
        ),
        (
            "grappe: process 1 of 2 on n1 was killed by SIGKILL\n  | bad file",
            "grappe : processus 1 de 2 sur n1 a été tué par SIGKILL\n  | bad file",
        ),
        # What others say stays.
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
            "grappe: sbatch: sbatch: error: the file is empty\nsbatch: error: Permission denied\n  it is damaged",
            "grappe : sbatch: sbatch: error: the file is empty\nsbatch: error: Permission denied\n  il est endommagé",
        ),
        (
            "sbatch: error: step 3: the file is empty\nthe file is empty",
            "sbatch: error: step 3: the file is empty\nle fichier est vide",
        ),
    ],
)
def test_messages_are_french_but_for_names_and_others_words(english: str, french: str) -> None:
    assert catalogue_of("fr").message(english) == french


@pytest.mark.parametrize("content", [None, b"", b"no catalogue", b"\xde\x12\x04\x95\x00\x00", "cut off"])
def test_a_file_that_is_not_whole_gives_english(content: bytes | str | None, tmp_path: Path, monkeypatch) -> None:
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
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / "all.zip"), "GRAPPE_LANG": "fr"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("the file is empty\n", "")


@pytest.mark.parametrize("text", ["a: b; c. d, " * 1500, "grappe: " * 2000, "'" * 9000, "ValueError: " * 1500])
def test_a_hostile_text_is_given_up(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a text is made, only so many of its parts are looked at."""
    looked, whole = list[str](), _Message._by_one_template

    def counted(self: _Message, text: str, depth: int, least: int) -> tuple[int, str] | None:
        looked.append(text)
        return whole(self, text, depth, least)

    monkeypatch.setattr(_Message, "_by_one_template", counted)
    assert len(SMALL.message(text)) >= len(text)
    assert len(looked) <= 4 * PLACES


def test_a_text_longer_than_any_message_is_left_alone() -> None:
    text = "grappe: it is damaged" + "!" * LONGEST
    assert SMALL.message(text) is text


def test_letters_that_a_terminal_lacks() -> None:
    assert encodable("nœud, tâche…", "utf-8") == "nœud, tâche…"
    assert encodable("nœud, tâche…", "latin-1") == "noeud, tâche..."
    assert encodable("nœud, tâche…", "ascii") == "noeud, tache..."
    assert encodable("nœud", "no such encoding") == "noeud"


def test_english_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "grappe: ended at once; earlier checkpoints are kept"
    assert translated(text) is text
    monkeypatch.setenv("GRAPPE_LANG", "fr")
    assert translated(text) == "grappe : terminé aussitôt ; les points de contrôle antérieurs restent"


WORDS = st.text(st.sampled_from("ab {}'é\n"), max_size=12)


@pytest.mark.parametrize(
    ("template", "message", "values"),
    [
        ("plan: {name}={text} is not {what}", "plan: a=b is not a number", ["a", "b", "a number"]),
        ("plan: {name}={text} is not {what}", "plan: a=b is a number", None),
        ("plan: {name}={text} is not {what}", "the plan: a=b is not 1", None),
        ("a{x}a", "a", None),  # the ends do not overlap
        ("a{x}a", "aa", [""]),
        ("abc", "abc", []),
        ("abc", "abcabc", None),
        ("{a} of {b}, not {a}", "1 of 2, not 1", ["1", "2", "1"]),
        ("{a} of {b}, not {a}", "1 of 2, not 3", None),
        ("step {step}", "step 3", ["3"]),  # a number is one word
        ("step {step}", "step 3 is no folder", None),
        ("write {{…}} into {file}", "write {…} into x", ["x"]),
    ],
)
def test_a_message_gives_its_values(template: str, message: str, values: list[str] | None) -> None:
    assert Template.of(template, "").values(message) == values


def test_values_are_filled_in() -> None:
    template = Template.of("plan: {name}={text} is not {what}", "plan : {name}={text} n'est pas {what}")
    assert template.filled(["a", "b", "un nombre"]) == "plan : a=b n'est pas un nombre"
    template = Template.of("write {{…}} into {file}", "écrivez {{…}} dans {file}")
    assert template.filled(["{0.__class__}"]) == "écrivez {…} dans {0.__class__}"


def test_a_value_in_quotation_marks_and_one_that_a_user_typed_are_names() -> None:
    assert Template.of("no '{a}' in {b}, `{c}`", "").kept == {0, 2}
    assert Template.of("{what}: {key}={shown} or --to {place}: {error} and {file2}", "").kept == {1, 2, 3, 5}


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
