"""`make demo`: a training is killed, resumed, verified and reported."""

import json
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_SECONDS

SCRIPT = Path(__file__).parents[1] / "scripts" / "demo.py"


def test_the_demo_kills_resumes_verifies_and_reports(tmp_path: Path, monkeypatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=4 * PATIENCE_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nkilled\n" in done.stdout
    [run] = (tmp_path / "runs").iterdir()  # as the README's `grappe report runs/*` takes them
    description = json.loads((run / "run.json").read_text())
    assert description["restarts"] == 1
    assert description["status"] == "finished"
    assert "same" in done.stdout
    assert (run / "report.html").stat().st_size > 10_000
