"""One batch of evaluation is tried before the first step: what only evaluation raises is known then."""

from pathlib import Path

import pytest
import torchmetrics

from grappe import train
from grappe.errors import OutOfMemory
from grappe.training.options import Options
from tests.faults.resuming import run
from tests.parity.structured import Texts
from tests.processes import Pool


class Scored(Texts):
    """A metric that does not take the model's dict."""

    def metrics(self) -> dict[str, torchmetrics.Metric]:
        return {"accuracy": torchmetrics.classification.MulticlassAccuracy(3)}


class Short(Texts):
    """Metrics for which there is no memory left."""

    def metrics(self) -> dict[str, torchmetrics.Metric]:
        raise MemoryError


def test_memory_that_evaluation_lacks_is_said_as_memory(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match="out of memory in process 0"):
        train(Short(), run=tmp_path / "run", options=Options(steps=2))


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2,microbatches=2"])
def test_it_fails_before_the_first_step(pool: Pool, tmp_path: Path, plan: str) -> None:
    with pytest.raises(AssertionError, match="the metric 'accuracy' does not take what the model"):
        run(pool, Scored(), plan, tmp_path / "run", steps=2)
    curves = tmp_path / "run" / "metrics.jsonl"  # process 1 may fail before process 0 has made it
    assert not curves.exists() or '"step"' not in curves.read_text()


def test_without_evaluation_nothing_is_tried(pool: Pool, tmp_path: Path) -> None:
    run(pool, Scored(), "", tmp_path / "run", steps=2, steps_only=True)
