"""Draws docs/train.svg from a real run in a real terminal (needs tmux): `python docs/picture.py`."""

from __future__ import annotations

import io
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH, HEIGHT = 104, 24
COMMAND = "grappe train digits --plan replicate=2"
SESSION = "grappe-picture"


def tmux(*arguments: str) -> str:
    return subprocess.run(["tmux", *arguments], check=True, capture_output=True, text=True).stdout


def frames() -> list[str]:
    """Records the terminal's content, a few times a second, until the run's closing table."""
    with tempfile.TemporaryDirectory() as folder:
        shell = f"cd {folder}; PATH={Path(sys.executable).parent}:$PATH PS1='$ ' bash --norc"
        tmux("-f", "/dev/null", "new-session", "-d", "-s", SESSION, "-x", str(WIDTH), "-y", str(HEIGHT), shell)
        try:
            time.sleep(1)
            tmux("send-keys", "-t", SESSION, f"clear; {COMMAND}", "Enter")
            seen: list[str] = []
            while len(seen) < 3000:
                time.sleep(0.1)
                seen.append(tmux("capture-pane", "-e", "-p", "-t", SESSION))
                if "finished," in seen[-1]:
                    return seen
            raise SystemExit("the run did not end within five minutes")
        finally:
            tmux("kill-session", "-t", SESSION)


def main() -> None:
    """The last frame with a bar, half way or later, and the closing table of the last frame."""
    seen = frames()
    running = [frame for frame in seen if re.search(r"epoch +[5-9] .*━", frame)]
    bar = next(line for line in reversed((running or seen)[0].splitlines()) if "━" in line or "epoch" in line)
    lines = [line for line in seen[-1].rstrip().splitlines() if not re.fullmatch(r"(\x1b\[\d*m)*\$ ?", line)]
    closing = next(index for index, line in enumerate(lines) if line.startswith("training"))
    half = (running or seen)[0].rstrip().splitlines()
    shown = [f"$ {COMMAND}", *half[: half.index(bar) + 1], "\x1b[0m…", *lines[closing:]]
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text.from_ansi("\n".join(shown)))
    drawn = console.export_svg(title="grappe")
    # rich asks for a font from elsewhere; a page that is read offline has monospace.
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)
    drawn = drawn.replace(f"node:&#160;{socket.gethostname()}&#160;", "node:&#160;laptop&#160;")
    (Path(__file__).parent / "train.svg").write_text(drawn)


if __name__ == "__main__":
    main()
