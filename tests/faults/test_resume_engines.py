"""Pipelines, other engines and other optimizers, killed and resumed: the same bits, or the same weights elsewhere."""

from pathlib import Path

import pytest
import torch

import grappe
from grappe.checkpoint.weights import LOCAL, MODEL, OPTIMIZER
from grappe.task import Task
from grappe.training.run import Run
from tests.faults.resuming import STEPS, WANDERER, check_another_plan, check_same_bits, run
from tests.parity import reference
from tests.parity.cell import TOLERANCE, difference
from tests.parity.optimizers import TunedImages, TunedTokens
from tests.parity.planted import With
from tests.parity.tasks import Images
from tests.parity.wide import Wide
from tests.processes import Pool

DROPPING = Images(rule="adam", dropout=0.3, clip=0.5)
NORMED = Images(rule="sgd", batchnorm=True, dropout=0.3, clip=0.5)
EVEN = Images(rule="adam", dropout=0.3, clip=0.5, batchnorm=True, batch_size=16, samples=48)
SPECTRAL = With(kind="spectral", clip=0.5)  # whose buffers each forward moves
PIPELINES = [
    ("pipeline=3,schedule=gpipe,microbatches=4", DROPPING),
    ("pipeline=2,microbatches=3,replicate=2", DROPPING),
    ("pipeline=2,microbatches=2,shard=2,zero=1,precision=bf16", DROPPING),
    ("pipeline=2,schedule=interleaved,microbatches=4,shard=2,precision=fp16", DROPPING),
    ("pipeline=4,schedule=zero_bubble,microbatches=4", DROPPING),
    ("pipeline=2,microbatches=2", EVEN),
    ("pipeline=2,microbatches=2", SPECTRAL),
    ("pipeline=2,schedule=gpipe,microbatches=2,replicate=2,batchnorm=sync", EVEN),
]
DEEPSPEED = [
    ("replicate=2", DROPPING),
    ("shard=2,zero=1,microbatches=2", DROPPING),
    ("shard=2,zero=2", NORMED),
    ("shard=2", DROPPING),
    ("shard=2,precision=bf16,microbatches=2", NORMED),
    ("shard=2,precision=fp16", DROPPING),
    ("shard=2,offload=cpu", DROPPING),
    ("offload=cpu", NORMED),
    ("shard=2,offload=nvme:{disk}", Wide()),
]
HOROVOD = [
    (f"engine=horovod{more}", Images(rule=rule, batchnorm=True, dropout=0.3, clip=0.5))
    for more in ("", ",replicate=2,microbatches=2")
    for rule in ("sgd", "adam")
]
OPTIMIZERS = [
    (plan, TunedImages(by=rule, batchnorm=True, dropout=0.3, clip=0.5))
    for rule, plans in {
        "lars": ["shard=2,zero=1"],
        "lamb": ["shard=3"],
        "muon": ["shard=2"],
        "schedule-free": ["", "shard=2", "engine=lightning,replicate=2", "engine=deepspeed,replicate=2"],
        "lbfgs": ["replicate=2", "shard=2"],
        "sam": ["", "shard=2"],
    }.items()
    for plan in plans
]
SAME = [*PIPELINES, *((f"engine=deepspeed,{plan}", task) for plan, task in DEEPSPEED), *HOROVOD, *OPTIMIZERS]
MOVES = [
    ("", "pipeline=2,microbatches=3"),
    ("pipeline=2,microbatches=3", ""),
    ("pipeline=4,schedule=gpipe,microbatches=2", "pipeline=2,schedule=interleaved,microbatches=4"),
    ("pipeline=2,microbatches=2,shard=2", "replicate=3"),
    ("shard=4", "pipeline=2,schedule=zero_bubble,microbatches=2,replicate=2"),
]
DEEPSPEED_MOVES = [
    ("shard=2", ""),
    ("", "shard=3"),
    ("shard=2,zero=1", "shard=2"),
    ("shard=2", "shard=3,zero=2"),
    ("shard=2,offload=cpu", "replicate=2"),
    ("replicate=2", "shard=2,offload=cpu"),
    ("shard=2", "shard=2,offload=cpu"),
]


def name_of(value: object) -> str:
    return value if isinstance(value, str) else getattr(value, "by", "") or getattr(value, "rule", "")


@pytest.mark.parametrize(("plan", "task"), SAME, ids=name_of)
def test_the_same_plan_goes_on_to_the_same_bits(pool: Pool, tmp_path: Path, plan: str, task: Task) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    saved = check_same_bits(pool, task, plan.format(disk=disk), tmp_path)
    if "engine" not in plan:
        assert (task is SPECTRAL or getattr(task, "batchnorm", False)) == any(one.startswith(LOCAL) for one in saved)


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_another_plan_goes_on_with_the_same_samples(pool, tmp_path, killed, before, after):
    check_another_plan(pool, WANDERER, killed, (before, after), tmp_path / "run")


@pytest.mark.parametrize(("before", "after"), DEEPSPEED_MOVES)
def test_deepspeed_goes_on_in_another_world_with_the_same_samples(pool, tmp_path, killed, before, after):
    plans = f"engine=deepspeed,{before}".rstrip(","), f"engine=deepspeed,{after}".rstrip(",")
    check_another_plan(pool, WANDERER, killed, plans, tmp_path / "run")


CLOSURES = {"batch_size": 29, "epochs": 4, "scheduled": False}


@pytest.mark.parametrize(
    ("task", "before", "after"),
    [
        *((TunedTokens(by=rule), "shard=3", "pipeline=2,microbatches=4") for rule in ("lamb", "muon", "schedule-free")),
        *((TunedTokens(by=rule), "pipeline=2,microbatches=4", "shard=2") for rule in ("lamb", "muon", "schedule-free")),
        *((TunedImages(by=rule, **CLOSURES), "replicate=2", "shard=2") for rule in ("lbfgs", "sam")),
    ],
    ids=name_of,
)
def test_other_optimizers_go_on_in_another_world(pool, tmp_path, killed, task, before, after):
    check_another_plan(pool, task, killed, (before, after), tmp_path / "run")


@pytest.mark.parametrize("plan", ["", "shard=2", "pipeline=2,microbatches=4"])
def test_what_is_evaluated_saved_and_loaded_is_not_what_is_trained(pool: Pool, tmp_path: Path, plan: str) -> None:
    task = TunedTokens(by="schedule-free")
    run(pool, task, plan, tmp_path / "run", evaluate_every=1, save_every=2)
    tensors, ending = Run(tmp_path / "run").latest().read_tensors(), ".trained_weight"
    trained = {
        name.removeprefix(OPTIMIZER).removesuffix(ending): tensors.read(name)
        for name in tensors
        if name.startswith(OPTIMIZER) and name.endswith(ending)
    }
    evaluated = {name: tensors.read(MODEL + name) for name in trained}
    wanted = reference.train(task, STEPS)["weights"]
    assert difference(wanted, trained)[0] <= TOLERANCE, "evaluations changed what is learned"
    assert difference(wanted, evaluated)[0] > 100 * TOLERANCE
    model = grappe.load(Run(tmp_path / "run"), task)
    assert difference(evaluated, dict(model.state_dict()))[0] == 0
    dataset = task.data("validation", tmp_path)
    with torch.no_grad():
        values, counts = task.loss(model(dataset.inputs), dataset.targets), task.counts(dataset.targets)
    *_, last = Run(tmp_path / "run").records("evaluation")
    assert last["loss"] == pytest.approx(float((values * counts).sum() / counts.sum()), rel=1e-5)
    outputs = torch.stack(list(grappe.predict(Run(tmp_path / "run"), dataset.inputs, task=task)))
    torch.testing.assert_close(outputs, model(dataset.inputs).detach())
