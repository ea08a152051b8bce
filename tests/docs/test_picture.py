"""The picture of a training in the README has the rows that a training's end has today."""

import html
import re
from pathlib import Path

from tests.training.watchers.test_console import SMALL, closing

PICTURE = Path(__file__).parents[2] / "docs" / "train.svg"
TEXT = re.compile(r'<text[^>]*\by="([\d.]+)"[^>]*>(.*?)</text>')


def test_the_picture_is_of_todays_output() -> None:
    lines: dict[float, str] = {}
    for height, text in TEXT.findall(PICTURE.read_text()):
        shown = html.unescape(text).replace("\xa0", " ")
        lines[float(height)] = lines.get(float(height), "") + shown
    shown = [line.partition("  ")[0] for _, line in sorted(lines.items())]
    rows = closing([SMALL, SMALL], "")
    missing = rows.keys() - {"training loss", ""} - set(shown)
    assert not missing, f"make it again: python docs/picture.py ({', '.join(missing)})"
    assert "next" in shown and any(line.startswith("grappe evaluate") for line in rows.values())
