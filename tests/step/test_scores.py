"""The scores of an evaluation: what each loss is divided by, and that numbers leave no holes in the heap."""

import itertools
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import Tensor

from grappe.data.batch import Batch, Microbatch
from grappe.errors import TaskError
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.step.scores import BLOCK, DeviceNumbers, Metrics, Scorer, bytes_kept
from grappe.task import Task
from grappe.tasks.digits import Digits

HEAP = """
import torch
from grappe.profiling.memory import data_size, keep_freed_memory
from grappe.step.scores import DeviceNumbers
from grappe.tasks.pysource import PySource

task = PySource(width=256, depth=2, heads=4)
model, column = task.model(), DeviceNumbers(torch.device("cpu"))
with keep_freed_memory(), torch.no_grad():
    for number in range(60):
        inputs, targets = (torch.randint(0, 256, (16, 128)) for _ in range(2))
        column.append(task.loss(task.forward(model, inputs), targets).sum())
        if number == 20:
            before = data_size()
print(data_size() - before)
"""


def test_numbers_come_back_as_they_were_over_several_blocks() -> None:
    column = DeviceNumbers(torch.device("cpu"))
    numbers = [math.pi * number for number in range(2 * BLOCK + 3)]
    for number in numbers:
        column.append(torch.tensor(number) if number % 2 < 1 else number)
    kept = [float(torch.tensor(number)) if number % 2 < 1 else number for number in numbers]
    assert column.tolist() == kept


@pytest.mark.parametrize("count", [1, BLOCK, BLOCK + 1])
def test_the_bytes_of_a_column_are_foreseen(count: int) -> None:
    column = DeviceNumbers(torch.device("cpu"))
    for number in range(count):
        column.append(number)
    assert bytes_kept(count, 1) == sum(block.nbytes for block in column._blocks)


def test_no_number_is_an_empty_list() -> None:
    assert DeviceNumbers(torch.device("cpu")).tolist() == []


@pytest.mark.slow
def test_numbers_that_are_kept_leave_the_heap_of_an_evaluation_as_it_was() -> None:
    done = subprocess.run([sys.executable, "-c", HEAP], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 16 << 20  # one microbatch's


class Counted(Task):
    """Two losses, of which only some samples have the second."""

    def loss(self, output: Any, target: Any) -> dict[str, Tensor]:
        return {"first": output, "second": 10 * output}

    def counts(self, target: Any) -> dict[str, Tensor]:
        return {"first": torch.ones_like(target), "second": target}


def test_each_loss_is_divided_by_its_own_count() -> None:
    task = Counted()
    scorer = Scorer(task, Plan(), World(process=ProcessRank(), device=torch.device("cpu")))
    for output, target in (([1.0, 2.0], [1.0, 0.0]), ([3.0, 4.0], [0.0, 0.0])):
        targets = torch.tensor(target)
        micro = Microbatch(None, targets, 2, task.counts(targets))
        scorer.add(torch.tensor(output), micro, Batch(0, 0, (micro,), 2, 2.0, np.arange(2)))
    scores = scorer.scores(4)
    assert scores.metrics == {"loss_first": 2.5, "loss_second": 10.0}
    assert (scores.loss, scores.losses) == (12.5, {"loss_first": 4.0, "loss_second": 1.0})


class Judged(Digits):
    """Metrics that torchmetrics computes of logits, or of what `scored` makes of them."""

    sigmoid: bool = False

    def metrics(self) -> dict[str, Any]:
        return {"f1": torchmetrics.classification.BinaryF1Score()}

    def scored(self, output: Any) -> Any:
        return output.sigmoid() if self.sigmoid else output


def judged(task: Task, cuts: list[int]) -> Metrics:
    """Metrics that were given logits, of which some are alone between 0 and 1, in batches that end at `cuts`."""
    logits = torch.tensor([0.2, -3.0, 0.6, 4.0, 0.3, -1.0])
    targets = torch.tensor([1, 0, 1, 1, 1, 0])
    metrics = Metrics(task, World(process=ProcessRank(launcher="test"), device=torch.device("cpu")))
    for first, end in itertools.pairwise((0, *cuts, 6)):
        micro = Microbatch(None, targets[first:end], end - first, None)
        metrics.keep_first(logits[first:end], micro)
        metrics.update(logits[first:end], micro)
    return metrics


@pytest.mark.parametrize("cuts", [[], [3], [1, 2]])
def test_a_metric_that_depends_on_how_batches_are_cut_is_refused(cuts: list[int]) -> None:
    with pytest.raises(TaskError, match=r"the metric 'f1' is 1 of 6 samples at once, and .*def scored\(self, output\)"):
        judged(Judged(), cuts).check_cut()
    metrics = judged(Judged(sigmoid=True), cuts)
    metrics.check_cut()
    assert metrics.computed([metrics.states()]) == {"f1": 1.0}


def test_metrics_of_what_has_no_row_for_each_sample_are_not_compared() -> None:
    metrics = judged(Judged(), [])
    metrics.keep_first([torch.zeros(3)], Microbatch(None, torch.zeros(2), 2, None))
    metrics.check_cut()


class Summed(torchmetrics.Metric):
    """The sum of all outputs, in their own precision, as torchmetrics' perplexity adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sum", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, output: Tensor, target: Tensor) -> None:
        self.sum = self.sum + output.sum()

    def compute(self) -> Tensor:
        return self.sum


class Adding(Digits):
    """A metric that adds outputs up."""

    def metrics(self) -> dict[str, Any]:
        return {"sum": Summed()}


def test_metrics_get_half_precision_as_float32() -> None:
    metrics = Metrics(Adding(), World(process=ProcessRank(launcher="test"), device=torch.device("cpu")))
    outputs = (torch.arange(12.0) / 7 + 100).to(torch.bfloat16)
    for part in outputs.split(5):
        micro = Microbatch(None, torch.zeros(len(part)), len(part), None)
        metrics.keep_first(part, micro)
        metrics.update(part, micro)
    metrics.check_cut()
    assert metrics.computed([metrics.states()]) == {"sum": pytest.approx(float(outputs.double().sum()), rel=1e-7)}


class OfBatches(Summed):
    """The mean of the batches' means."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("batches", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, output: Tensor, target: Tensor) -> None:
        self.sum, self.batches = self.sum + output.mean(), self.batches + 1

    def compute(self) -> Tensor:
        return self.sum / self.batches


class Averaging(Digits):
    def metrics(self) -> dict[str, Any]:
        return {"mean": OfBatches()}


def test_a_mean_of_batches_is_refused_though_equal_parts_have_it() -> None:
    metrics = Metrics(Averaging(), World(process=ProcessRank(launcher="test"), device=torch.device("cpu")))
    metrics.keep_first(torch.arange(6.0) ** 2, Microbatch(None, torch.zeros(6), 6, None))
    with pytest.raises(TaskError, match=r"the metric 'mean' is 9.167 of 6 samples at once, and 7 in parts"):
        metrics.check_cut()
