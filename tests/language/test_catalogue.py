"""Translations of messages."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grappe.language import catalogue, catalogue_of, translated
from grappe.language.catalogue import LONGEST, PLACES, Catalogue, Template, _Message, encodable, pieces, read

FRENCH = tomllib.loads(Path(__file__).with_name("french.toml").read_text())
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


@pytest.mark.parametrize(("english", "french"), FRENCH["results"].items())
def test_results_are_french(english: str, french: str) -> None:
    assert catalogue_of("fr").result(english) == french


@pytest.mark.parametrize(("english", "french"), FRENCH["messages"].items())
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
    assert Template(template, "").values(message) == values


def test_values_are_filled_in() -> None:
    template = Template("plan: {name}={text} is not {what}", "plan : {name}={text} n'est pas {what}")
    assert template.filled(["a", "b", "un nombre"]) == "plan : a=b n'est pas un nombre"
    template = Template("write {{…}} into {file}", "écrivez {{…}} dans {file}")
    assert template.filled(["{0.__class__}"]) == "écrivez {…} dans {0.__class__}"


def test_a_value_in_quotation_marks_and_one_that_a_user_typed_are_names() -> None:
    assert Template("no '{a}' in {b}, `{c}`", "").kept == {0, 2}
    assert Template("{what}: {key}={shown} or --to {place}: {error} and {file2}", "").kept == {1, 2, 3, 5}


def test_a_brace_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="Single '}'"):
        pieces("a } b")


@given(st.lists(WORDS, min_size=1, max_size=4), st.lists(WORDS, min_size=3, max_size=3))
def test_what_a_template_made_matches_it(texts: list[str], values: list[str]) -> None:
    doubled = [one.replace("{", "{{").replace("}", "}}") for one in texts]
    template = doubled[0] + "".join(f"{{x{i}}}{one}" for i, one in enumerate(doubled[1:]))
    message = texts[0] + "".join(value + one for value, one in zip(values, texts[1:], strict=False))
    found = Template(template, template)
    given_values = found.values(message)
    assert given_values is not None
    assert found.filled(given_values) == message


def test_all_that_is_said_in_french_can_be_written_in_ascii() -> None:
    plain = catalogue_of("fr", "ascii").result("398 MB to 1,403.5 MB in each process")
    assert plain == "398 Mo a 1 403,5 Mo dans chaque processus"
