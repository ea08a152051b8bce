"""Trackio: logs to the run's folder unless TRACKIO_DIR names another: TRACKIO_DIR=RUN/trackio trackio show."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grappe.training.watchers.base import Watcher
from grappe.training.watchers.logger import Logger, settings_of


class Trackio(Logger):
    """Logger that writes to RUN/trackio, one run over restarts; it has no histograms."""

    name = "trackio"
    gradients_ready = Watcher.gradients_ready

    def open(self, folder: Path, start: int, description: Mapping[str, Any]) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(folder.resolve() / self.name))  # it is read when trackio is imported
        import trackio  # pyrefly: ignore

        project = os.environ.get("TRACKIO_PROJECT", "grappe")
        name = folder.resolve().name
        config = settings_of(description)
        self._run = trackio.init(project=project, name=name, config=config, resume="allow", embed=False)

    def scalars(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        for step, values in rows:
            self._run.log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()


LOGGER = Trackio
