"""Shows a notebook as a page: its text, and its code with the outputs that it was saved with."""

from __future__ import annotations

import json
from pathlib import Path


def markdown(file: Path) -> str:
    """Returns a notebook as Markdown."""
    parts = []
    for cell in json.loads(file.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
        elif text.strip():
            parts.append(f"````python\n{text}\n````")
    return "\n\n".join(parts) + "\n"
