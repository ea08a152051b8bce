"""Models of transformers are sharded, split and pipelined by what they say of themselves, and learn the same."""

import functools
import re
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from grappe.errors import PlanError
from grappe.launch.world import World
from grappe.parallel.materialise import untied
from grappe.parallel.pipeline.cut import pipeline_units
from grappe.parallel.tensor import split_tensors
from grappe.plan import Plan
from tests.gallery.cell import seen
from tests.parallel import families
from tests.parity.cell import TOLERANCE, difference
from tests.processes import Pool

STEPS = 3
NATIVE = (
    "replicate=2", "shard=2,zero=2", "shard=2,offload=cpu", "recompute", "tensor=2", "tensor=2,shard=2",
    "pipeline=2,schedule=interleaved,microbatches=2", "pipeline=2,schedule=zero_bubble,microbatches=2",
    "pipeline=2,shard=2,microbatches=2,recompute", "pipeline=2,tensor=2,microbatches=2",
)  # fmt: skip
"""What takes a model's units, its tensor plan or its order of layers from transformers, and one that takes none."""
CELLS = [
    *(("Llama", plan) for plan in NATIVE),
    *(("NeoX", plan) for plan in ("shard=2", "tensor=2", "pipeline=2,microbatches=2")),
    *(("SlidingQwen", plan) for plan in ("tensor=2", "pipeline=2,microbatches=4")),
    *(("TiedLlama", plan) for plan in ("shard=2", "tensor=2")),
    *(("GPT2", plan) for plan in ("shard=2", "recompute")),
    ("Bert", "shard=2"),
]


@functools.cache
def alone(pool: Pool, name: str) -> dict[str, Any]:
    return pool.run("tests.parity.cell:train", 1, getattr(families, name)(), "", STEPS)[0]


@pytest.mark.parametrize(("name", "plan"), CELLS)
def test_every_plan_learns_the_same(pool: Pool, name: str, plan: str) -> None:
    task, processes = getattr(families, name)(), Plan.parse(plan).processes
    found = pool.run("tests.parity.cell:train", processes, task, plan, STEPS)[0]
    gap, worst = difference(seen(alone(pool, name)["weights"]), seen(found["weights"]))
    assert gap <= TOLERANCE, f"{worst} is {gap:.1e} away"
    assert found["scores"].loss == pytest.approx(alone(pool, name)["scores"].loss, rel=1e-5)


def test_uneven_counts_give_the_mean_over_all_counted_tokens_as_transformers_own_loss(pool: Pool) -> None:
    found = alone(pool, "Llama")
    task = families.Llama()
    torch.manual_seed(task.seed)
    model, data = task.model().train(), task.data("train", None)  # type: ignore[arg-type]
    ids = torch.tensor(found["ids"][0])
    inputs = {name: one[ids] for name, one in data.inputs.items()}
    assert float(model(**inputs, labels=data.targets[ids]).loss) == pytest.approx(found["losses"][0], rel=1e-6)


def test_units_are_the_layers_of_which_those_that_share_weights_are_not_sharded() -> None:
    for name, kinds in (("Llama", {"LlamaDecoderLayer"}), ("GPT2", {"GPT2Block"}), ("Bert", {"BertLayer"})):
        task = getattr(families, name)()
        model = task.model()
        units = task.units(model)
        tied = {type(unit).__name__ for unit in units} - kinds
        assert tied == ({"BertEmbeddings"} if name == "Bert" else set())
        assert {type(unit).__name__ for unit in untied(model, units)} == kinds and len(units) in (2, 3, 4)
    assert families.Llama().units(torch.nn.Linear(2, 2)) == []


@pytest.mark.parametrize(
    ("name", "plan", "words"),
    [
        ("GPT2", "tensor=2", "GPT2LMHeadModel has no tensor plan in transformers: give the task a tensor_plan"),
        ("Llama", "tensor=4", "num_key_value_heads=2, which 4 processes cannot share"),
    ],
)
def test_what_cannot_be_split_is_refused(name: str, plan: str, words: str) -> None:
    task = getattr(families, name)()
    with torch.device("meta"):
        model = task.model()
    with pytest.raises(PlanError, match=re.escape(words)):
        split_tensors(model, task, Plan.parse(plan), World.__new__(World))


@pytest.mark.parametrize("name", ["GPT2", "Bert"])
def test_a_model_without_a_pipelines_order_is_refused(name: str) -> None:
    task = getattr(families, name)()
    with pytest.raises(PlanError, match=r"has no pipeline plan in transformers.*units\(model\), the blocks"):
        pipeline_units(task, task.model())


def test_a_tied_matrix_is_refused_by_pipelines(pool: Pool) -> None:
    told = pool.run("tests.engines.told:told", 2, families.TiedLlama(), "pipeline=2,microbatches=2", 1)
    assert "is shared by stages" in str(told[0])
