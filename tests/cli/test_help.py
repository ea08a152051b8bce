"""Help and the parser's messages in French."""

import io
import re

import pytest
from cyclopts import CycloptsError
from docs.messages.others import commands
from rich.console import Console

from grappe.cli.application import FIRST, GROUPS
from grappe.cli.commands import app
from grappe.cli.corrections import corrected
from grappe.cli.help import ADVANCED, TranslatedHelp, examples, set_formatter
from grappe.language import catalogue_of

ENGLISH = re.compile(r"\b(?:the|of|is|with|which|default|choices|required|commands|usage)\b", re.IGNORECASE)
WIDTH = 500  # one line for each text


@pytest.fixture
def french():
    app.help_formatter = TranslatedHelp(text=catalogue_of("fr").text, app=app)
    yield
    app.help_formatter = None


@pytest.fixture
def english():
    app.help_formatter = TranslatedHelp(text=str, app=app)
    yield
    app.help_formatter = None


def shown(words: tuple[str, ...]) -> str:
    written = io.StringIO()
    app.help_print(list(words), console=Console(file=written, width=WIDTH))
    return written.getvalue()


@pytest.mark.parametrize("words", [(), *commands(app)], ids=" ".join)
def test_no_english_sentence_is_left(words: tuple[str, ...], french: None) -> None:
    text = shown(words)
    assert text.startswith("Utilisation : grappe")
    code = re.sub(r"\S*[-/_.=$]\S*|\bnode\b", "", text)
    assert not ENGLISH.findall(code), ENGLISH.findall(code)


def test_each_command_ends_with_examples_that_can_be_typed() -> None:
    set_formatter(app, "fr")
    try:
        for words in commands(app):
            name, text = " ".join(words), shown(words)
            assert f"grappe {name} " in text.partition("╭")[0] or "Exemples:" in text or words == ("data",), name
    finally:
        app.help_formatter = None
    for lines in examples().values():
        for line in lines:
            app.parse_args(line.split()[1:], exit_on_error=False, print_error=False)
    assert set(examples()) <= {" ".join(words) for words in commands(app)}


def test_each_command_is_in_a_group_and_each_rare_option_exists() -> None:
    commands_of_groups = [name for names in GROUPS.values() for name in names]
    assert sorted(commands_of_groups) == sorted(name for name in app if not name.startswith("-"))
    options = " ".join(shown(words) for words in commands(app))
    assert [name for name in ADVANCED if not re.search(rf"{name}\b", options)] == []


def test_help_begins_with_eight_commands_and_help_all_has_all(english: None) -> None:
    def named() -> set[str]:
        return set(re.findall(r"^│ ([a-z-]+) ", shown(()), re.MULTILINE)) - {"--help", "--version"}

    assert named() == FIRST and len(FIRST) == 8
    app.help_formatter = TranslatedHelp(text=str, app=app, all_commands=True)
    assert named() == {name for names in GROUPS.values() for name in names}


@pytest.mark.parametrize("words", [(), *commands(app)], ids=" ".join)
def test_nothing_of_the_parser_is_left_in_the_help(words: tuple[str, ...], english: None) -> None:
    text = shown(words)
    assert not re.search(r"--empty-|--[a-z-]+\.[a-z]+ |\[default: \(\)\]|Parameters|ARGS", text)


def test_rare_options_are_in_a_second_box(english: None) -> None:
    usual, rare = shown(("train",)).split("Advanced options")
    assert "--evaluate-every" in usual and "--stall-limit" not in usual
    assert "--stall-limit" in rare
    assert "the evaluation before." in usual  # the last words of a long text


@pytest.mark.parametrize(
    ("words", "french"),
    [
        ("trian", "il n'y a pas de commande 'trian' : c'est grappe train"),
        ("train digits --qqq 1", "il n'y a pas d'option --qqq : grappe train --help les énumère"),
        ("train digits --epochs 1", "epochs est un champ de la tâche, et s'écrit sans tirets : "),
        ("wait", "il manque RUN : grappe wait --help"),
        ("submit --account", 'Commande "submit" : le paramètre --account demande un argument.'),
        ("evaluate r --split tst", 'Valeur "tst" impossible pour --split. Au choix : "train", "validation", "test".'),
        ("prune --keep x", 'Valeur impossible pour --keep : "x" ne se convertit pas en int.'),
        ("wait a b", "'b' est de trop pour grappe wait : grappe wait --help"),
        ("prune --keep 1 --keep 2", "Le paramètre --keep est donné plusieurs fois."),
    ],
)
def test_what_the_parser_says(words: str, french: str) -> None:
    """cyclopts 5.4's messages; where an other version's differ, they stay in English."""
    with pytest.raises(CycloptsError) as refused:
        app(words.split(), exit_on_error=False, print_error=False)
    assert french in catalogue_of("fr").message(f"grappe: {corrected(refused.value, words.split(), app)}")
