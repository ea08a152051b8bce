"""Several losses by name, and metrics over the training batches: each sample once, under every kind of plan."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from grappe.data.draw import mix, permute
from grappe.errors import TaskError
from grappe.step.loss import values_of
from grappe.training.run import Run
from tests.faults.resuming import run
from tests.parity.counted import Chosen, Counted, Several
from tests.parity.tasks import Images, Seen
from tests.processes import Pool


class Weighted(Several):
    """The same, with samples that count more than others."""

    def counts(self, target: Tensor) -> Tensor:
        return 0.5 + target


class Whole(Several):
    """The same as a loss of the whole batch."""

    whole_batch_loss = True


SPREAD = """
microbatches=3 replicate=3,microbatches=2 shard=2,recompute exact=4,replicate=2 pipeline=2,microbatches=2
pipeline=2,microbatches=2,replicate=2 engine=textbook,replicate=2 engine=lightning,replicate=2
engine=lightning,microbatches=2 engine=deepspeed,shard=2,microbatches=2 engine=horovod,replicate=2
"""
PLANS = ["", *SPREAD.split()]


def trained(pool: Pool, task: Images, plan: str, folder: Path, **options: int) -> list[dict]:
    run(pool, task, plan, folder, **options)
    return list(Run(folder).records())


@functools.cache
def by_hand() -> tuple[list[float], list[dict[str, float]]]:
    """Trains Counted without grappe; returns the losses of the steps and of the evaluations."""
    task = Counted()
    torch.manual_seed(task.seed)
    model = task.model()
    optimizer = task.optimizer(list(model.named_parameters()))
    schedule = task.schedule(optimizer, 6)
    images, targets = (torch.from_numpy(np.asarray(one)) for one in task.data("train", Path()).stored(np.arange(29)))
    steps, scored = [], []

    def losses(ids: Any) -> dict[str, Tensor]:
        output, target = model(images[ids]), targets[ids]
        entropy = F.cross_entropy(output, target, reduction="none")
        chosen = output[target > 3]
        return {
            "classes": (entropy * (0.5 + target)).sum() / (0.5 + target).sum(),
            "size": chosen.square().sum() / max(1, chosen.numel()),
        }

    for epoch in range(2):
        order = permute(np.arange(29), key=mix(task.seed, epoch), length=29)
        for ids in np.split(order, [12, 24]):
            optimizer.zero_grad()
            loss = sum(losses(torch.from_numpy(ids)).values())
            loss.backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
            steps.append(loss.item())
        with torch.no_grad():
            found = {f"loss_{name}": float(one) for name, one in losses(torch.arange(29)).items()}
        scored.append({"loss": sum(found.values()), **found})
    return steps, scored


def evaluated(records: list[dict]) -> dict:
    """The last evaluation."""
    return [one for one in records if one["kind"] == "evaluation"][-1]


FEW = ["microbatches=3", "replicate=3,microbatches=2", "pipeline=2,microbatches=2"]


@pytest.mark.parametrize(
    ("kind", "plan"),
    [(Several, plan) for plan in PLANS] + [(kind, plan) for kind in (Weighted, Whole, Counted) for plan in FEW],
)
def test_losses_add_up_and_metrics_see_every_training_sample_once(pool, tmp_path, kind, plan):
    records = trained(pool, kind(), plan, tmp_path / "run", training_metrics=True)
    scored = [one for one in records if one["kind"] == "evaluation"]
    assert len(scored) == 2
    for number, one in enumerate(scored):
        assert one["loss_classes"] + one["loss_size"] == pytest.approx(one["loss"], rel=1e-6)
        assert one["seen"] == one["training_seen"] == 29
        assert 0 <= one["training_accuracy"] <= 1 and len(one["training_each"]) == 5
        steps = [step for step in records if step["kind"] == "step"][3 * number : 3 * number + 3]
        if kind is not Weighted:  # each batch counts as many as it has samples
            sizes = [12, 12, 5]
            mean = sum(step["loss"] * size for step, size in zip(steps, sizes, strict=True)) / 29
            both = one["training_loss_classes"] + one["training_loss_size"]
            assert both == pytest.approx(mean, rel=1e-5)


def test_they_are_the_same_under_every_plan(pool: Pool, tmp_path: Path) -> None:
    found = [
        evaluated(trained(pool, Weighted(), plan, tmp_path / f"run-{number}", training_metrics=True))
        for number, plan in enumerate(("", "replicate=2,microbatches=2", "pipeline=2,microbatches=2"))
    ]
    for one in found[1:]:
        for name, value in found[0].items():
            if name.startswith(("loss", "training_loss", "training_accuracy")):
                assert one[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize(
    ("kind", "plan"),
    [(Counted, plan) for plan in PLANS] + [(Chosen, plan) for plan in ("", *PLANS) if "pipeline" not in plan],
)
def test_losses_with_counts_of_their_own_are_means_of_their_own(pool, tmp_path, kind, plan):
    """Whatever the plan, a loop by hand has the same losses: each divided by its count in the global batch."""
    records = trained(pool, kind(), plan, tmp_path / "run")
    steps = [one["loss"] for one in records if one["kind"] == "step"]
    scored = [
        {name: one[name] for name in ("loss", "loss_classes", "loss_size")}
        for one in records
        if one["kind"] == "evaluation"
    ]
    expected_steps, expected = by_hand()
    assert steps == pytest.approx(expected_steps, rel=2e-5)
    for found, wanted in zip(scored, expected, strict=True):
        assert found == pytest.approx(wanted, rel=2e-5)


def test_no_row_of_a_pipeline_is_filled_where_a_loss_has_none_for_a_sample(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"counts\(\) has no row for each sample for 'size'"):
        trained(pool, Chosen(), "pipeline=2,microbatches=2", tmp_path / "run")


@pytest.fixture(scope="module")
def scored(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The records of one process that evaluates after each two steps."""
    folder = tmp_path_factory.mktemp("scored") / "run"
    return trained(pool, Several(), "", folder, training_metrics=True, evaluate_every=2)


@pytest.mark.parametrize(
    "plan",
    ["", *FEW, "shard=2", "engine=lightning,replicate=2", "engine=deepspeed,shard=2", "engine=horovod,replicate=2"],
)
def test_every_so_many_steps_they_are_those_of_the_steps_so_far(pool, tmp_path, scored, plan):
    """The value of each line is the one that an evaluation after that step would have shown."""
    shown = trained(pool, Several(), plan, tmp_path / "shown", training_metrics=True, print_every=1)
    steps = {one["step"]: one for one in shown if one["kind"] == "step"}
    assert [steps[number]["training_seen"] for number in range(1, 7)] == [12, 24, 29, 12, 24, 29]
    two, evaluation = steps[2], next(one for one in scored if one["kind"] == "evaluation")
    # AUROC keeps every sample: evaluations show it, and no line between.
    names = {name for name in evaluation if name.startswith("training_")} - {"training_auroc"}
    assert names == {name for name in two if name.startswith("training_")} and len(names) > 3
    for name in names:
        assert two[name] == pytest.approx(evaluation[name], rel=1e-5), name


class Late(Seen):
    """A metric that few samples are not enough for."""

    def compute(self) -> Tensor:
        if self.count < 20:
            raise ValueError("too few samples")
        return super().compute()


class Composed(Images):
    """The same with an error, which torchmetrics composes of an accuracy."""

    def metrics(self) -> dict[str, Any]:  # pyrefly: ignore
        return {"error": 1 - MulticlassAccuracy(5, average="micro")}


class Few(Images):
    """The same with a metric of at least 20 samples."""

    def metrics(self) -> dict[str, Any]:  # pyrefly: ignore
        return {"late": Late(), "seen": Seen()}


def test_a_line_leaves_out_what_few_samples_are_not_enough_for(pool: Pool, tmp_path: Path) -> None:
    records = trained(pool, Few(), "replicate=2", tmp_path / "run", training_metrics=True, print_every=1)
    found = [(one.get("training_late"), one["training_seen"]) for one in records if one["kind"] == "step"]
    assert found[:3] == [(None, 12), (24, 24), (29, 29)]


def test_a_metric_that_is_composed_of_others(pool: Pool, tmp_path: Path) -> None:
    scored = evaluated(trained(pool, Composed(), "", tmp_path / "run", training_metrics=True))
    plain = evaluated(trained(pool, Images(), "", tmp_path / "plain", training_metrics=True))
    assert scored["training_error"] == pytest.approx(1 - plain["training_accuracy"])
    with pytest.raises(AssertionError, match="the metric 'error' has no state that processes could"):
        trained(pool, Composed(), "replicate=2", tmp_path / "two", training_metrics=True)


class Sometimes(Several):
    """A loss that only some batches have."""

    def loss(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:  # pyrefly: ignore
        found = super().loss(output, target)
        return found if bool((target == 4).any()) else {"classes": found["classes"]}


def test_a_loss_that_only_some_batches_have(pool: Pool, tmp_path: Path) -> None:
    found = [
        evaluated(trained(pool, Sometimes(samples=12, batch_size=4), plan, tmp_path / f"run-{number}"))
        for number, plan in enumerate(("", "replicate=3", "microbatches=4"))
    ]
    assert all("training_loss_size" in one for one in found)


def test_without_the_option_there_are_only_losses(pool: Pool, tmp_path: Path) -> None:
    last = evaluated(trained(pool, Several(), "replicate=2", tmp_path / "run"))
    assert "training_loss_size" in last and "training_accuracy" not in last
    plain = evaluated(trained(pool, Images(), "replicate=2", tmp_path / "plain"))
    assert not any(name.startswith(("loss_", "training_")) for name in plain)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "empty dictionary"),
        ({"a b": torch.ones(2)}, "has the name 'a b'"),
        ({1: torch.ones(2)}, "has the name 1"),
        ({"a": torch.ones(2), "b": torch.ones(3)}, "different shapes"),
        ({"a": torch.ones(2), "b": 1.0}, "returned float for 'b'"),
        ({"a": torch.ones(2, dtype=torch.int64)}, "returned torch.int64 for 'a'"),
    ],
)
def test_what_is_no_dictionary_of_losses_is_refused(given: dict, words: str) -> None:
    class Wrong(Images):
        def loss(self, output: object, target: object) -> dict:  # pyrefly: ignore
            return given

    with pytest.raises(TaskError, match=words):
        values_of(Wrong(), None, None, 2, None)


def test_a_metric_and_a_loss_of_one_name_are_refused(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="both called 'loss_size'"):
        trained(pool, Clashing(), "", tmp_path / "run")


class Clashing(Several):
    """A metric that is called as a loss is shown."""

    def metrics(self) -> dict:
        return {"loss_size": super().metrics()["accuracy"]}
