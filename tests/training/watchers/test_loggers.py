"""TensorBoard and Weights & Biases are told of one run over its restarts, gradients and parameters too."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from grappe.errors import UsageError
from grappe.training.run import Run
from grappe.training.watchers import logger
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
        for step in range(start + 1, start + 6):
            one.scalars(step, {"x": value})
        one.finish()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("x")] == [
        *((step, 1.0) for step in range(1, 4)),
        *((step, 2.0) for step in range(4, 9)),
    ]


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
    with pytest.raises(UsageError, match="there is tensorboard, wandb"):
        logger.find("visdom")
    monkeypatch.setitem(logger.LOGGERS, "wandb", "a_package_that_nobody_has")
    with pytest.raises(UsageError, match=r"pip install 'grappe\[wandb\]'"):
        logger.find("wandb")
