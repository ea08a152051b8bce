"""Shows a notebook as a page: its text, its code and what the code printed; solutions are folded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from docs import labs

FENCE = "`" * 5
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
OUTDATED = "> The words that grappe prints have changed since this lab was executed."


def markdown(file: Path) -> str:
    """Returns a notebook as Markdown."""
    book = json.loads(file.read_text())
    parts: list[str] = []
    folded = False
    for cell in book["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            for part in labs.parts(text):
                if folded and part.startswith("## "):
                    parts.append("</details>")
                folded = folded and not part.startswith("## ")
                if labs.HEADING.match(part):
                    parts.append(f'<details class="solution"><summary>{part.removeprefix("## ")}</summary>')
                    folded = True
                else:
                    parts.append(part)
        elif text.strip():
            parts.append(f"{FENCE}python\n{text}\n{FENCE}")
            parts += [shown for output in cell["outputs"] if (shown := _output(output))]
    parts += ["</details>"] * folded
    if labs.outdated(book) == "words":
        parts.insert(1, OUTDATED)
    return "\n\n".join(part for part in parts if part) + "\n"


def _output(output: dict[str, Any]) -> str:
    """An output of a cell: a page of HTML, a picture, or text."""
    data = output.get("data", {})
    if html := data.get("text/html") or data.get("image/svg+xml"):
        return f'{FENCE}{{raw}} html\n<div class="output">{"".join(html)}</div>\n{FENCE}'
    if png := data.get("image/png"):
        picture = f'<img alt="" src="data:image/png;base64,{"".join(png).strip()}">'
        return f'{FENCE}{{raw}} html\n<div class="output">{picture}</div>\n{FENCE}'
    text = ANSI.sub("", "".join(output.get("text") or data.get("text/plain") or output.get("traceback") or ""))
    return f"{FENCE}{{code-block}} text\n:class: output\n\n{text.rstrip()}\n{FENCE}" if text.strip() else ""
