"""TensorBoard and Weights & Biases are told of one run over its restarts, gradients and parameters too."""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from grappe.errors import UsageError
from grappe.step.scores import Scores
from grappe.training.run import Run
from grappe.training.watchers import logger
from grappe.training.watchers.base import Record, Watcher
from tests.training.test_training import train


def losses(run: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in Run(run).records("step")}


def test_tensorboard_has_one_run_over_restarts(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    train(run, steps=4, log=("tensorboard",))
    train(run, log=("tensorboard",))
    found = EventAccumulator(str(run / "tensorboard")).Reload()
    told = {event.step: event.value for event in found.Scalars("training/loss")}
    wanted = losses(run)
    assert sorted(told) == list(range(1, 10))
    assert all(math.isclose(told[step], wanted[step], rel_tol=1e-6) for step in wanted)
    assert [event.step for event in found.Scalars("validation/loss")][-1] == 9
    names = found.Tags()["histograms"]
    weights = [name for name in names if name.startswith("parameters/")]
    assert weights
    assert {name.replace("parameters/", "gradients/") for name in weights} <= set(names)
    (first, *_) = found.Histograms(weights[0])
    assert first.step == 1
    assert sum(first.histogram_value.bucket) == first.histogram_value.num > 0


def test_what_a_restart_takes_again_is_told_once(tmp_path: Path) -> None:
    """A start that was killed had told of steps beyond its checkpoint."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from grappe.training.watchers.tensorboard_log import LOGGER

    for start, value in ((0, 1.0), (3, 2.0)):
        one = LOGGER()
        one.open(tmp_path, start, {"fields": {"lr": 0.1}})
        one.scalars([(step, {"x": value}) for step in range(start + 1, start + 6)])
        one.finish()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("x")] == [
        *((step, 1.0) for step in range(1, 4)),
        *((step, 2.0) for step in range(4, 9)),
    ]


@pytest.mark.slow
def test_wandb_offline_has_one_id_over_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    import wandb

    monkeypatch.delenv("WANDB_MODE", raising=False)
    made = []
    init = wandb.init
    monkeypatch.setattr(wandb, "init", lambda **options: made.append(init(**options)) or made[-1])
    run = tmp_path / "a-run"
    train(run, steps=4, log=("wandb",))
    train(run, log=("wandb",))
    history, ids, kinds = {}, set(), set()
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        ids.add(file.stem)
        for item in items(file):
            if "training/loss" in item:
                history[item["step"]] = item["training/loss"]
            kinds |= {name for name, value in item.items() if value == "histogram"}
    assert ids == {"run-a-run"}
    assert [one.settings.x_disable_stats for one in made] == [False, False], "the machine's figures are sampled"
    assert {name.partition("/")[0] for name in kinds} == {"gradients", "parameters"}
    wanted = losses(run)
    assert sorted(history) == sorted(wanted)
    assert all(math.isclose(history[step], wanted[step], rel_tol=1e-6) for step in wanted)


def items(file: Path) -> list[dict]:
    """Reads the history in an offline run's file: protocol buffers in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for data in log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            told = record.history.item
            found.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in told})
    return found


def log_records(data: bytes) -> Iterator[bytes]:
    """Blocks of 32 KiB, the first after a header of 7 bytes; a record is checksum, length, kind and its bytes."""
    place, whole = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            yield whole
            whole = b""


def test_a_logger_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert logger.names() == ["mlflow", "tensorboard", "wandb"]
    with pytest.raises(UsageError, match="there is mlflow, tensorboard, wandb"):
        logger.find("visdom")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install wandb"):
        logger.find("wandb")


class Remembering(logger.Logger):
    """A logger that keeps what it is given."""

    name = "remembering"
    gradients_ready = Watcher.gradients_ready

    def open(self, folder: Path, start: int, description: dict) -> None:
        self.rows: list = []

    def scalars(self, rows: list) -> None:
        self.rows += rows

    def finish(self) -> None: ...


def test_a_step_that_a_killed_start_has_logged_is_not_logged_again(tmp_path: Path) -> None:
    """The first start has saved step 3 and was killed after step 5; the second one begins at step 4."""
    Run.begin(tmp_path / "run", {})

    def started(first: int, last: int) -> Remembering:
        made = Remembering()
        made.started(SimpleNamespace(folder=tmp_path / "run", start=first - 1, description={}))
        for step in range(first, last + 1):
            made.stepped(Record(step, 0, step, 0.5, 0.1, 0.01, None, False, 0))
            if step == 3:
                made.saving(step)
        return made

    killed = started(1, 5)
    killed._flush()  # a second later
    resumed = started(4, 7)
    resumed.evaluated(7, Scores(samples=1, count=1.0, loss=0.5, metrics={"accuracy": 1.0}))
    resumed.ended(None)
    assert [step for step, _ in killed.rows] == [1, 2, 3, 4, 5]
    assert [(step, sorted(values)[0]) for step, values in resumed.rows] == [
        (6, "training/loss"), (7, "training/loss"), (7, "validation/accuracy"),
    ]  # fmt: skip
    assert started(4, 6).rows == []


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    """Puts a module in the place of a package that the tests do not install: it takes what the real one takes."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def test_a_stand_in_for_mlflow_gets_one_run_over_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same training was logged by hand to a database of mlflow-skinny 3.17."""
    runs: list[SimpleNamespace] = []

    class MlflowClient:
        def __init__(self, tracking_uri: str) -> None:
            assert tracking_uri == f"sqlite:///{tmp_path / 'run' / 'mlflow' / 'mlflow.db'}"

        def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
            return SimpleNamespace(experiment_id="1") if runs else None

        def create_experiment(self, name: str) -> str:
            return "1"

        def search_runs(self, experiments: list[str], text: str, max_results: int) -> list[SimpleNamespace]:
            return [run for run in runs if text == f"tags.grappe_id = '{run.tags['grappe_id']}'"]

        def create_run(self, experiment: str, run_name: str, tags: dict) -> SimpleNamespace:
            runs.append(SimpleNamespace(info=SimpleNamespace(run_id="a"), tags=tags, metrics=[], params=[], status=""))
            return runs[-1]

        def update_run(self, run: str, status: str) -> None:
            runs[0].status = status

        def log_batch(self, run: str, metrics: Sequence = (), params: Sequence = ()) -> None:
            runs[0].metrics += metrics
            runs[0].params += params

        def set_terminated(self, run: str) -> None:
            runs[0].status = "FINISHED"

    entities = SimpleNamespace(Metric=lambda *values: values, Param=lambda *values: values)
    stand_in(monkeypatch, "mlflow", MlflowClient=MlflowClient, entities=entities)
    train(tmp_path / "run", steps=4, log=("mlflow",))
    train(tmp_path / "run", log=("mlflow",))
    (run,) = runs
    logged = {step: value for name, value, _, step in run.metrics if name == "training/loss"}
    assert logged == losses(tmp_path / "run")
    assert ("epochs", "3") in run.params
    assert run.status == "FINISHED"
