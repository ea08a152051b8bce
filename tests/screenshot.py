"""Takes the picture of a report for docs/measure.md: `python -m tests.screenshot REPORT.html docs/report.png`."""

import sys
from pathlib import Path

from tests.chromium import Browser, found

WIDTH, HEIGHT = 1360, 1180


def main() -> None:
    """The top of the page, in the light theme."""
    source, target = map(Path, sys.argv[1:])
    program = found()
    if program is None:
        sys.exit("there is no Chromium here: apt-get install chromium")
    browser = Browser(program)
    try:
        browser.prefer("light")
        browser.open(source, WIDTH, HEIGHT)
        browser.picture(target)
    finally:
        browser.close()


if __name__ == "__main__":
    main()
