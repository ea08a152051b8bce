"""Shows grappe in a minute: trains, kills the training, resumes it, verifies a plan, and opens the report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import webbrowser
from pathlib import Path

PLAN = "replicate=2,device=cpu,threads=1"
EVALUATIONS = 3
"""The training is killed after so many of its twelve."""
PATIENCE_SECONDS = 600


def main() -> int:
    """The run is runs/demo-TIME, where `grappe runs` and `grappe report runs/*` find it."""
    run = Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    train = ["train", "digits", "epochs=12", "--plan", PLAN, "--run", str(run)]

    say("1. Train LeNet on handwritten digits, on two processes; kill -9 in the middle", train)
    training = subprocess.Popen(command(train))
    kill_after(training, run / "metrics.jsonl")

    say("2. The same command goes on where the last checkpoint was", train)
    subprocess.run(command(train), check=True)

    verify = ["verify", "digits", "--plan", PLAN, "--steps", "4"]
    say("3. Do two processes learn what one plain process learns?", verify)
    subprocess.run(command(verify), check=True)

    report = ["report", str(run)]
    say("4. The report: one HTML file, which opens offline", report)
    subprocess.run(command(report), check=True)
    page = run / "report.html"
    if has_screen():
        webbrowser.open(page.resolve().as_uri())
    return 0


def command(words: list[str]) -> list[str]:
    """The grappe of this Python."""
    return [sys.executable, "-m", "grappe", *words]


def say(what: str, words: list[str]) -> None:
    """A heading, and the command that is run."""
    print(f"\n{what}\n$ grappe {' '.join(words)}\n", flush=True)


def kill_after(training: subprocess.Popen[bytes], curves: Path) -> None:
    """Kills the training once it has been evaluated a few times."""
    end = time.monotonic() + PATIENCE_SECONDS
    while training.poll() is None and time.monotonic() < end:
        if evaluations(curves) >= EVALUATIONS:
            training.send_signal(signal.SIGKILL)
            training.wait()
            print("\nkilled", flush=True)
            return
        time.sleep(0.01)
    training.kill()
    sys.exit(f"the training ended by itself, with exit code {training.wait()}, before it could be killed")


def evaluations(curves: Path) -> int:
    """How many evaluations the curves have; their last line may be half written."""
    if not curves.exists():
        return 0
    lines = curves.read_text().rpartition("\n")[0].splitlines()
    return sum(json.loads(line)["kind"] == "evaluation" for line in lines)


def has_screen() -> bool:
    """Whether a browser would have a screen to open on."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


if __name__ == "__main__":
    sys.exit(main())
