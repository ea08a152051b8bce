"""MLflow: logs to a database in the run's folder unless MLFLOW_TRACKING_URI names a server: mlflow ui."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grappe.training.watchers.base import Watcher
from grappe.training.watchers.logger import Logger

MOST = 1000  # metrics of one request
LONGEST = 500  # characters of a parameter


class MLflow(Logger):
    """Logger that writes to RUN/mlflow/mlflow.db or a server, one run over restarts; it has no histograms."""

    name = "mlflow"
    gradients_ready = Watcher.gradients_ready

    def open(self, folder: Path, start: int, description: Mapping[str, Any]) -> None:
        import mlflow  # pyrefly: ignore

        self._mlflow, place = mlflow, folder.resolve() / self.name
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{place / 'mlflow.db'}"
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "grappe")
        there = self._client.get_experiment_by_name(experiment)
        number = there.experiment_id if there else self._client.create_experiment(experiment)
        name = description.get("name") or folder.resolve().name
        tag = f"tags.grappe_id = '{description['id']}'"
        earlier = self._client.search_runs([number], tag, max_results=1)
        if earlier:
            self._run = earlier[0].info.run_id
            self._client.update_run(self._run, "RUNNING")
            return
        self._run = self._client.create_run(number, run_name=name, tags={"grappe_id": description["id"]}).info.run_id
        started = {"task": description.get("task"), "plan": description.get("plan"), **description.get("fields", {})}
        parameters = [mlflow.entities.Param(key, str(value)[:LONGEST]) for key, value in started.items()]
        self._client.log_batch(self._run, params=parameters)

    def scalars(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        now, metric = round(1000 * time.time()), self._mlflow.entities.Metric
        metrics = [metric(name, value, now, step) for step, values in rows for name, value in values.items()]
        for first in range(0, len(metrics), MOST):
            self._client.log_batch(self._run, metrics=metrics[first : first + MOST])

    def finish(self) -> None:
        self._client.set_terminated(self._run)


LOGGER = MLflow
