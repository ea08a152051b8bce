"""Exact plans: one hash on any number of processes, and across a change of their number."""

import hashlib
from pathlib import Path

import pytest
import torch

from grappe import draw, randn_like
from grappe.plan import Plan
from grappe.training.options import Options
from tests.faults.resume_cell import Loaded, curves, hashes
from tests.parity import reference
from tests.parity.cell import TOLERANCE, difference
from tests.parity.planted import Centred, With
from tests.parity.tasks import Images, Tokens
from tests.processes import Pool

SIZES = (1, 2, 8)  # shard=4 and the resumed runs below have four processes
STEPS = 6


class Everything(Images):
    """Batch normalisation, dropout and augmentation; the last batch of an epoch leaves some pieces empty."""

    batchnorm: bool = True
    dropout: float = 0.3
    batch_size: int = 24
    samples: int = 61
    clip: float | None = 0.5

    def augment(self, inputs, targets, keys):
        shift = draw(keys, 2)
        return inputs * (0.5 + shift[:, :1, None, None]) + shift[:, 1:, None, None], targets

    def optimizer(self, named_parameters):
        if self.rule == "adam":
            return torch.optim.AdamW(named_parameters, lr=0.003)
        return torch.optim.SGD(named_parameters, lr=0.1, momentum=0.9)


class FromDisk(Everything, Loaded):
    """The same through a DataLoader."""


def digest(found: dict) -> str:
    """One hash of all that a training gave: weights, buffers, losses, norms, scores."""
    total = hashlib.sha256()
    for name, tensor in sorted(found["weights"].items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.contiguous().numpy().tobytes())
    total.update(repr((found["losses"], found["norms"], found["lr"], found["scores"].loss)).encode())
    return total.hexdigest()


def trained(pool: Pool, task, plan: str, size: int) -> list[dict]:
    text = f"{plan},replicate={size}" if size > 1 else plan
    return pool.run("tests.parity.cell:train", size, task, text, STEPS)


TASKS = {
    "sgd": Everything(rule="sgd"),
    "adamw": Everything(rule="adam"),
    "tokens": Tokens(samples=40, batch_size=18),
    "unused": Images(unused=True, rule="adam", samples=40),
    "loaded": FromDisk(rule="adam"),
    "shared": With(kind="shared", samples=40, batch_size=24),
}


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param("sgd", "exact=8", marks=pytest.mark.nightly),
        pytest.param("adamw", "exact=8", marks=pytest.mark.nightly),
        ("adamw", "exact=8,precision=bf16"),
        pytest.param("adamw", "exact=8,precision=fp64", marks=pytest.mark.nightly),
        ("sgd", "exact=8,precision=bf16,channels_last"),
        ("adamw", "exact=8,recompute"),
        ("tokens", "exact=8"),
        ("unused", "exact=8"),
        ("loaded", "exact=8,workers=0"),
        ("sgd", "exact=8,engine=textbook"),
        pytest.param("tokens", "exact=8,engine=textbook", marks=pytest.mark.nightly),
        ("shared", "exact=8"),
    ],
)
def test_one_hash_on_any_number_of_processes(pool: Pool, name: str, plan: str) -> None:
    found = {size: trained(pool, TASKS[name], plan, size) for size in SIZES}
    wanted = digest(found[1][0])
    for size, everyone in found.items():
        assert {digest({**everyone[0], **one, "weights": everyone[0]["weights"]}) for one in everyone} == {wanted}, size
    ids = {
        size: [[i for one in everyone for i in one["ids"][step]] for step in range(STEPS)]
        for size, everyone in found.items()
    }
    assert all(one == ids[1] for one in ids.values())


@pytest.mark.parametrize(
    ("name", "plan", "more"),
    [
        ("sgd", "exact=8", ("shard=2", "shard=8")),
        ("adamw", "exact=8,precision=bf16", ("shard=2,zero=1", "shard=4")),
        ("tokens", "exact=8", ("shard=2,zero=2", "shard=4,recompute")),
        ("unused", "exact=4", ("shard=4",)),
        ("shared", "exact=4", ("shard=2",)),
        ("loaded", "exact=4,workers=0", ("shard=4",)),
    ],
)
def test_the_same_hash_where_everything_is_sharded(pool: Pool, name: str, plan: str, more: tuple[str, ...]) -> None:
    wanted = digest(trained(pool, TASKS[name], plan, 1)[0])
    for one in more:
        everyone = pool.run("tests.parity.cell:train", Plan.parse(one).processes, TASKS[name], f"{plan},{one}", STEPS)
        assert digest(everyone[0]) == wanted, one
        assert len({repr(found["losses"]) for found in everyone}) == 1


def test_native_and_textbook_have_the_same_bits(pool: Pool) -> None:
    task = Everything(rule="adam", clip=None)
    one, other = (trained(pool, task, f"exact=4{engine}", 2)[0] for engine in ("", ",engine=textbook"))
    assert digest(one) == digest(other)


def test_without_exact_the_bits_differ(pool: Pool) -> None:
    """Else the tests above could not fail."""
    task = Images(rule="sgd", samples=40)
    plain = {digest(trained(pool, task, "", size)[0]) for size in (1, 2, 4)}
    assert len(plain) > 1


@pytest.mark.parametrize("name", ["tokens", "unused"])
def test_exact_learns_what_one_plain_process_learns(pool: Pool, name: str) -> None:
    found = trained(pool, TASKS[name], "exact=4", 2)[0]
    gap, worst = difference(reference.train(TASKS[name], STEPS)["weights"], found["weights"])
    assert gap <= TOLERANCE, worst


class Noisy(Images):
    """Adds noise of the samples' own."""

    def forward(self, model, inputs):
        return model(inputs + 0.3 * randn_like(inputs))


@pytest.mark.parametrize("plan", ["exact=4,shard=2", "exact=4,engine=textbook", "replicate=2,microbatches=2"])
def test_samples_have_the_draws_of_a_plain_process(pool: Pool, plan: str) -> None:
    plain, found = (
        pool.run("tests.parity.cell:train", Plan.parse(text).processes, Noisy(), text, STEPS)[0] for text in ("", plan)
    )
    gap, worst = difference(plain["weights"], found["weights"])
    assert gap <= TOLERANCE, worst
    assert found["scores"].loss == pytest.approx(plain["scores"].loss, rel=1e-5)


def test_batch_normalisation_is_that_of_the_pieces_one_after_the_other(pool: Pool) -> None:
    task = Images(batchnorm=True, rule="adam", clip=0.5)
    found = trained(pool, task, "exact=4", 2)[0]
    gap, worst = difference(reference.train(task, STEPS, pieces=4)["weights"], found["weights"])
    assert gap <= TOLERANCE, worst


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *((1, 4), (2, 1), (4, 8), (8, 2)),
        *(pytest.param(*sizes, marks=pytest.mark.nightly) for sizes in ((1, 2), (1, 8), (2, 4), (2, 8))),
        *(pytest.param(*sizes, marks=pytest.mark.nightly) for sizes in ((4, 1), (4, 2), (8, 1), (8, 4))),
    ],
)
def test_killed_under_one_number_of_processes_and_resumed_under_another(
    pool: Pool, tmp_path_factory, first: int, second: int
) -> None:
    """The last checkpoint and the curves are, to the bit, those of the run that never stopped."""
    rule = "sgd" if (first * second) % 8 == 0 else "adam"
    precision = ",precision=bf16" if first > second else ""
    task, text = Everything(rule=rule), f"exact=8{precision}"
    whole = tmp_path_factory.mktemp("whole") / "run"
    parts = tmp_path_factory.mktemp("parts") / "run"
    _part(pool, task, text, second, whole)
    _part(pool, task, text, first, parts, dies_at=4)
    told = _part(pool, task, text, second, parts)
    assert "resuming from step" in told
    assert _state(hashes(parts, STEPS)) == _state(hashes(whole, STEPS))
    assert curves(parts) == curves(whole)


@pytest.mark.parametrize(
    ("first", "second"), [("replicate=2", "shard=4"), ("shard=2,zero=2", ""), ("shard=4", "shard=2")]
)
def test_killed_and_resumed_with_another_share_of_the_model(
    pool: Pool, tmp_path: Path, first: str, second: str
) -> None:
    task, plans = Everything(rule="adam"), [f"exact=8,{one}".rstrip(",") for one in (first, second)]
    _run(pool, task, "exact=8", tmp_path / "whole")
    _run(pool, task, plans[0], tmp_path / "parts", dies_at=4)
    assert "resuming from step" in _run(pool, task, plans[1], tmp_path / "parts")
    assert _state(hashes(tmp_path / "parts", STEPS)) == _state(hashes(tmp_path / "whole", STEPS))
    assert curves(tmp_path / "parts") == curves(tmp_path / "whole")


def _part(pool: Pool, task, text: str, size: int, run: Path, dies_at: int | None = None) -> str:
    return _run(pool, task, f"{text},replicate={size}" if size > 1 else text, run, dies_at)


def _run(pool: Pool, task, plan: str, run: Path, dies_at: int | None = None) -> str:
    options, size = Options(keep=100, save_every=3), Plan.parse(plan).processes
    return pool.run("tests.faults.resume_cell:part", size, task, plan, run, options, dies_at)[0]


def _state(found: dict[str, str]) -> dict[str, str]:
    """Tensors; each process keeps a copy of the buffers, and the first stands for all."""
    first = {name: one for name, one in found.items() if not name.startswith("local.") and name != "json"}
    buffers = {name.split(".", 2)[2]: one for name, one in found.items() if name.startswith("local.")}
    copies = {(name.split(".", 2)[2], one) for name, one in found.items() if name.startswith("local.")}
    assert len(copies) == len(buffers), "the processes' buffers differ"
    return {**first, **buffers}


def test_a_buffer_that_nobody_can_combine_is_refused(pool: Pool) -> None:
    with pytest.raises(AssertionError, match=r"the buffer '2.3.seen' changes"):
        trained(pool, Centred(samples=40), "exact=4", 2)
