"""Row: one line of what a part of the GPU proof found."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Literal

import torch

from grappe.contrib.doctor.on_device import DeviceTrial

Verdict = Literal["passed", "failed", "measured", "not tried"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One check or measurement.

    Attributes:
        name: what was tried.
        verdict: `not tried` is never counted as passed; `text` then says why.
        text: the figures, or the reason, in a line.
        figures: the same as numbers; seconds, bytes and samples/s.
    """

    name: str
    verdict: Verdict
    text: str = ""
    figures: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Aim:
    """A figure that is aimed at on an H200; to miss it fails nothing.

    Attributes:
        form: how the figure is written, as `str.format` has it: "{:.0%}".
        at_most: whether less is better.
    """

    figure: float
    form: str
    at_most: bool = False

    def text(self, found: float, *, on_gpu: bool) -> str:
        """Says the aim, and on a GPU whether it is reached."""
        words = f"aim: at {'most' if self.at_most else 'least'} {self.form.format(self.figure)}"
        if not on_gpu:
            return f"{words} on an H200"
        return f"{words}, {'reached' if self.reached(found) else 'MISSED'}"

    def reached(self, found: float) -> bool:
        """Returns whether a figure is as good as the aim."""
        return found <= self.figure if self.at_most else found >= self.figure


class Part:
    """The device, and a way to report rows as they are found.

    Args:
        folder: keeps the rows.
        scratch: an empty folder for runs, removed afterwards.
    """

    def __init__(self, device: Literal["cuda", "cpu"], folder: Path, scratch: Path) -> None:
        self.device, self.folder, self.scratch = device, folder, scratch
        self._file = folder / "rows.jsonl"

    @property
    def on_gpu(self) -> bool:
        """Whether figures of this part are a GPU's."""
        return self.device == "cuda"

    def report(self, row: Row) -> None:
        """Writes a row down at once: what was found before a time limit counts."""
        with self._file.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(f"{row.verdict:10} {row.name}  {row.text}", flush=True)

    def check(self, name: str, right: bool, text: str = "", **figures: float) -> None:
        """Reports `passed` or `failed`."""
        self.report(Row(name=name, verdict="passed" if right else "failed", text=text, figures=figures))

    def measured(self, name: str, text: str, *, aim: Aim | None = None, found: float = 0.0, **figures: float) -> None:
        """Reports figures that nothing is demanded of, with an aim that `found` is compared with."""
        if aim is not None:
            text = f"{text}; {aim.text(found, on_gpu=self.on_gpu)}"
            figures |= {"aim": aim.figure, "against_aim": found}
        self.report(Row(name=name, verdict="measured", text=text, figures=figures))

    def trial(self, trial: DeviceTrial) -> None:
        """Reports what `grappe doctor --gpu` has tried as well."""
        verdicts: dict[str, Verdict] = {
            "passed": "passed", "FAILED": "failed", "measured": "measured", "not tried": "not tried",
        }  # fmt: skip
        self.report(Row(name=trial.what, verdict=verdicts[trial.verdict], text=trial.text, figures=dict(trial.figures)))

    def wait(self) -> None:
        """Waits until the device has done all that it was given."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def not_tried(self, name: str, reason: str) -> None:
        """Reports what could not be tried here."""
        self.report(Row(name=name, verdict="not tried", text=reason))


def read_rows(folder: Path) -> list[Row]:
    """Reads the rows that a part has reported, also those of a part that was ended."""
    try:
        lines = (folder / "rows.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [Row(**json.loads(line)) for line in lines]
