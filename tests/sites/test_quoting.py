"""Words in a real bash: variables are expanded there, and nothing else of a word is taken for code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from grappe.errors import UsageError
from grappe.sites.quoting import command_words, expanded


def bash(word: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-uc", f"printf '%s' {expanded(word)}"],
        capture_output=True, text=True, check=False, cwd=folder, env={"PATH": "/usr/bin:/bin", **variables},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("tcp://$HOST:3456", "tcp://n 0:3456"),
        ("${HOST}x", "n 0x"),
        ("a,b", "a,b"),
        ("$HOST$HOST", "n 0n 0"),
        ("it's $HOST", "it's n 0"),
        ("$(touch hacked)", "$(touch hacked)"),
        ("`touch hacked`;$HOST", "`touch hacked`;n 0"),
        ("${HOST:-$(touch hacked)}", "${HOST:-$(touch hacked)}"),
        ("$((1+1))", "$((1+1))"),
        ("5$", "5$"),
        ("$1", "$1"),
        ('a" b', 'a" b'),
        ("", ""),
    ],
)
def test_variables_only(word: str, expected: str, tmp_path: Path) -> None:
    done = bash(word, tmp_path, HOST="n 0")
    assert (done.stdout, done.returncode) == (expected, 0), done.stderr
    assert not list(tmp_path.iterdir())


def test_what_a_variable_holds_is_no_code(tmp_path: Path) -> None:
    assert bash("$HOST", tmp_path, HOST="$(touch hacked)").stdout == "$(touch hacked)"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("variables", [{}, {"HOST": ""}])
def test_an_empty_variable_ends_the_job(variables: dict[str, str], tmp_path: Path) -> None:
    done = bash("x$HOST", tmp_path, **variables)
    assert done.returncode != 0
    assert "HOST: is empty on this node, and an argument of the job needs it" in done.stderr


def test_a_plan_keeps_its_variables_for_each_process() -> None:
    words = ["train", "a,$B", "--plan", "offload=nvme:$TMP", "--plan=x$Y", "--data", "$D"]
    found = list(command_words(words))
    assert found[3:5] == ["'offload=nvme:$TMP'", "'--plan=x$Y'"]
    assert found[6] == '"${D:?is empty on this node, and an argument of the job needs it}"'
    with pytest.raises(UsageError, match=r"\$SLURM_PROCID is another for each process"):
        list(command_words(["train", "seed=$SLURM_PROCID"]))
