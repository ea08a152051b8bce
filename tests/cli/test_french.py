"""The command in French: real commands, their errors, and what stays in English."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import GRAPPE, ran
from tests.patience import PATIENCE_SECONDS
from tests.tasks.error_corpus import CASES

ENGLISH = re.compile(r"\b(?:the|there|give|use|is|with|must|has|leave|needs)\b")
FRENCH = "grappe : --race=3 : donnez un score et un nombre"


def grappe(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))}
    return subprocess.run(
        [sys.executable, "-m", "grappe", *words], cwd=cwd, env={**environment, **variables},
        capture_output=True, check=False, timeout=PATIENCE_SECONDS,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "french"),
    [
        ("train digts", "grappe : il n'y a pas de tâche 'digts' : vouliez-vous dire digits ?"),
        ("train digits lr=x", "lr=x n'est pas un nombre"),
        ("train digits --plan replicate=0", "grappe : replicate=0 : il faut au moins 1"),
        ("evaluate runs/none", "runs/none n'est pas une exécution (pas de run.json)"),
        ("verify digits", "grappe verify a besoin d'un plan : donnez --plan replicate=2"),
        ("submit --time x -- train digits", "--time=x : donnez des secondes, ou une durée comme 90s"),
        ("submit --time 3h -- torchrun my.py", "le job démarre lui-même les processus, donc retirez torchrun"),
        ("tune digits", "rien n'est cherché : donnez un intervalle, lr=0.01..1:log, ou des valeurs"),
        ("sites nowhere", "il n'y a pas de site 'nowhere'"),
        ("runs --race 3", "--race=3 : donnez un score et un nombre à atteindre"),
        ("wait", "il manque RUN : grappe wait --help"),
    ],
)
def test_an_error_is_told_in_french(words: str, french: str, tmp_path: Path) -> None:
    done = ran(GRAPPE, *words.split(), cwd=tmp_path, GRAPPE_LANG="fr")
    said = done.stderr
    assert done.returncode == 2
    assert said.startswith("grappe : ")
    assert french in said
    assert not ENGLISH.findall(said), said


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"LANG": "C"}, "grappe: --race=3: give a score"),
        ({"LANG": "fr_FR.UTF-8"}, f"{FRENCH} à"),
        ({"LC_ALL": "fr_FR.UTF-8", "GRAPPE_LANG": "en"}, "grappe: --race=3: give a score"),
        ({"GRAPPE_LANG": "de"}, "grappe: GRAPPE_LANG=de: grappe has en and fr, and takes English\ngrappe: --race=3:"),
        ({"LANG": "fr_FR.ISO-8859-1", "PYTHONIOENCODING": "latin-1"}, f"{FRENCH} à"),
        ({"LC_ALL": "C", "GRAPPE_LANG": "fr", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, f"{FRENCH} a"),
    ],
)
def test_the_environment_says_which_language(variables: dict[str, str], said: str, tmp_path: Path) -> None:
    done = grappe("runs", "--race", "3", cwd=tmp_path, **variables)  # which needs no torch
    assert done.stderr.decode(variables.get("PYTHONIOENCODING", "utf-8")).startswith(said)
    assert done.returncode == 2


def test_an_unknown_language_is_said_once(tmp_path: Path) -> None:
    world = {"GRAPPE_LANG": "de", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    first, second = (ran(GRAPPE, "tasks", cwd=tmp_path, RANK=rank, LOCAL_RANK=rank, **world) for rank in "01")
    assert "GRAPPE_LANG=de" in first.stderr
    assert second.stderr == ""


@pytest.mark.parametrize(
    ("words", "language"), [("--help", "en"), ("--help", "fr"), ("tasks", "fr"), ("runs --race 3", "en")]
)
def test_a_closed_output_is_no_error(words: str, language: str, tmp_path: Path) -> None:
    line = f"{shlex.quote(sys.executable)} -m grappe {words} >&-"
    variables = {**os.environ, "GRAPPE_LANG": language}
    done = subprocess.run(line, shell=True, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == (2 if "--race" in words else 0), done.stderr
    assert "Error" not in done.stderr


def test_foreign_text_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    done = ran(GRAPPE, "train", "\x07{name}%s{0}", cwd=tmp_path, GRAPPE_LANG="fr")
    assert "grappe : il n'y a pas de tâche '\\x07{name}%s{0}'" in done.stderr


def test_help_is_in_french_on_any_terminal(tmp_path: Path) -> None:
    for encoding in ("utf-8", "latin-1", "ascii"):
        done = grappe("evaluate", "--help", cwd=tmp_path, GRAPPE_LANG="fr", PYTHONIOENCODING=encoding)
        assert done.returncode == 0
        assert done.stdout.decode(encoding).startswith("Utilisation : grappe evaluate [OPTIONS] RUN")
        assert b"\\x" not in done.stdout


def test_a_log_has_one_language(tmp_path: Path) -> None:
    """Only what the user is told changes: the remedy is French on the terminal, and the log is as it always was."""
    (tmp_path / "wrong.py").write_text(CASES[0].text)
    words = ("train", "wrong.py", "--plan", "device=cpu", "--run", "run")
    done = ran(GRAPPE, *words, cwd=tmp_path, GRAPPE_LANG="fr")
    said = done.stderr
    assert done.returncode == 2
    assert "Les entrées ont 3 caractéristiques et la couche en prend 5 : nn.Linear(3, 4)" in said
    for log in tmp_path.rglob("*.log"):
        assert "grappe :" not in log.read_text()


@pytest.mark.parametrize("words", ["tasks", "tasks digits", "engines", "runs"])
def test_a_table_is_french_in_its_headings_and_cells(words: str, tmp_path: Path) -> None:
    shown = ran(GRAPPE, *words.split(), cwd=tmp_path, GRAPPE_LANG="fr").stdout
    assert any(french in shown for french in ("ce qu'elle apprend", "champ ", "clé ", "aucune exécution"))
    assert not ENGLISH.findall(shown), shown


def test_a_training_is_french_and_json_is_not(tmp_path: Path) -> None:
    done = ran(
        GRAPPE, "train", "digits", "epochs=1", "--plan", "device=cpu", "--run", "run", cwd=tmp_path, GRAPPE_LANG="fr"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("digits sur 1 processus (cpu, ")
    for french in (
        "échantillons d'entraînement, lot de 64",
        "époque  1  pas ",
        "terminé, ",
        "accuracy de validation",
        " pas par époque",
        " sur 180)",
    ):
        assert french in done.stdout
    assert not ENGLISH.findall(done.stdout), done.stdout
    shown = [
        ran(GRAPPE, "evaluate", "run", "--json", "--plan", "device=cpu", cwd=tmp_path, GRAPPE_LANG=one).stdout
        for one in ("en", "fr")
    ]
    assert json.loads(shown[0]) == json.loads(shown[1])
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().partition("\n")[0])
    assert {"kind", "step", "loss"} <= set(first)
