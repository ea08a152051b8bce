"""A real bash completes what is typed after grappe."""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from grappe.cli.commands import app
from grappe.cli.completion import script
from tests.commands import GRAPPE

TRY = """
source "$1"; shift
for line in "$@"; do
  COMP_LINE="$line"; COMP_POINT=${#line}; COMP_WORDS=($line); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
  _grappe_words 2>/dev/null
  echo "${COMPREPLY[*]}"
done
"""
LINES = {
    "grappe tra": "train",
    "grappe train dig": "digits",
    "grappe train digits mom": "momentum=",
    "grappe train mine.py wid": "width=",
    "grappe train mi": "mine.py",
    "grappe train digits --plan replicate=2,sh": "2,shard=",
    "grappe train digits --plan replicate=2,engine=tex": "textbook",
    "grappe train digits --evaluate-e": "--evaluate-every",
    "grappe evaluate ru": "runs/b runs/a",
    "grappe sites narval-": "narval-cpu",
}


def test_bash_completes_tasks_fields_plans_and_runs(tmp_path: Path) -> None:
    for run in ("a", "b"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "run.json").write_text("{}")
    (tmp_path / "mine.py").write_text("import nothing_of_that_name\nclass Mine(Task):\n    width: int = 3\n")
    (tmp_path / "grappe.bash").write_text(script(app, "bash"))
    shown = output("bash", "-c", TRY, "try", "grappe.bash", *LINES, cwd=tmp_path)
    assert dict(zip(LINES, shown.splitlines(), strict=True)) == LINES


def output(*command: str, cwd: Path) -> str:
    """Returns what a command prints that finds grappe on its search path."""
    path = {"PATH": f"{Path(GRAPPE).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **path}, capture_output=True, text=True, check=True)
    return done.stdout


def test_fish_completes_the_same_words(tmp_path: Path) -> None:
    fish = shutil.which("fish")
    if fish is None:
        pytest.skip("there is no fish")
    (tmp_path / "grappe.fish").write_text(script(app, "fish"))
    lines = {"grappe tra": "train", "grappe train dig": "digits", "grappe train digits --plan replicate=2,sh": "shard="}
    asked = "".join(f"; complete -C '{line}'" for line in lines)
    shown = output(fish, "--no-config", "-c", f"source grappe.fish{asked}", cwd=tmp_path)
    assert all(word in shown for word in lines.values()), shown


def test_zsh_completes_them_as_its_user_types(tmp_path: Path) -> None:
    zsh = shutil.which("zsh")
    if zsh is None:
        pytest.skip("there is no zsh")
    asked = {"tra": "train ", "train dig": "digits ", "train digits mom": "momentum=", "train digits -p sh": "shard="}
    child, terminal = pty.fork()
    if child == 0:
        path = f"{Path(GRAPPE).parent}:{os.environ['PATH']}"
        os.chdir(tmp_path)
        os.execve(zsh, [zsh, "-f", "-i"], {"HOME": str(tmp_path), "PATH": path, "TERM": "xterm", "PS1": "> "})
    try:
        os.write(terminal, b'eval "$(grappe completion zsh)"; echo "rea"dy\n')
        read_until(terminal, "ready")
        for typed, word in asked.items():
            os.write(terminal, f"grappe {typed}\t".encode())
            read_until(terminal, word)
            os.write(terminal, b"\x15")  # erases the line
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)


def read_until(terminal: int, text: str) -> None:
    """Reads what a terminal shows until `text` is there, without colours."""
    shown = ""
    while text not in re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown):
        assert select.select([terminal], [], [], 120)[0], shown
        shown += os.read(terminal, 4096).decode(errors="replace")
