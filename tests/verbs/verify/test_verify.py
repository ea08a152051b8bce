"""grappe verify: planted faults are found and named, and what has no fault is not called different."""

import re
from pathlib import Path

import pytest
from benchmarks import gallery_files

from grappe import Task
from grappe.cli.measuring import COLUMNS, verdict_cells
from grappe.launch.terminal import progress
from grappe.verbs.verify.verify import PlanVerdict, verify
from tests.parity import planted
from tests.parity.contrastive import Pairs, Views
from tests.parity.counted import Chosen, Counted
from tests.parity.structured import TASKS, Boxes, Graphs, StagedBoxes, StagedTexts, Texts
from tests.parity.tasks import Images, Tokens
from tests.processes import Pool


def verified(pool: Pool, task: Task, plan: str, fault: str = "") -> PlanVerdict:
    [found] = verify(task, [f"{plan},threads=1"], run=planted.runner(pool, fault))
    return found


IMAGES = Images(samples=64)
NORMED = Images(samples=64, batchnorm=True, rule="adam")
DROPPING = Images(samples=64, dropout=0.4, rule="adam")
BOTH = Images(samples=64, batchnorm=True, dropout=0.4, clip=0.5)


@pytest.mark.parametrize(
    ("task", "plan", "fault", "cause"),
    [
        (NORMED, "replicate=2", "no_synchronised_batchnorm", "batch normalisation.*per-process"),
        (DROPPING, "replicate=2", "alike_dropout", "dropout's random streams.*several slices draw the same"),
        (DROPPING, "replicate=2", "still_dropout", "dropout's random streams.*the step before"),
        (BOTH, "replicate=2", "fresh_dropout", "dropout's random streams.*started again"),
        (planted.Averaging(samples=60), "replicate=2", "", "^a loss that averages"),
        (IMAGES, "replicate=2", "means_of_means", "^means of slices are averaged"),
        (Counted(samples=64), "replicate=2", "counts_of_slices", "^means of slices are averaged"),
        (planted.Noisy(samples=64), "replicate=2,workers=0", "", "^a dataset that draws"),
        (planted.Jittery(samples=64), "replicate=2", "", "^augmentation that draws"),
        (planted.Centred(samples=64), "replicate=2", "", "^a buffer that is not synchronised .*seen"),
        (IMAGES, "replicate=2", "silent_bf16", "^a lower precision"),
        (IMAGES, "replicate=2,microbatches=2", "no_division_by_microbatches", "^accumulation"),
        (IMAGES, "replicate=2", "off_by_one", "^a sampler that is off by 1"),
        (IMAGES, "replicate=2", "doubled_sample", "^a doubled sample"),
        (IMAGES, "replicate=2", "dropped_last_batch", "^a dropped last batch: in step 4"),
    ],
)
def test_a_planted_fault_is_found_and_named(pool: Pool, task: Task, plan: str, fault: str, cause: str) -> None:
    found = verified(pool, task, plan, fault)
    assert found.verdict == "different"
    assert len(found.causes) == 1, found.causes
    assert re.search(cause, found.causes[0]), found.causes


@pytest.mark.parametrize(
    ("task", "plan"),
    [
        (IMAGES, "replicate=3,microbatches=2"),
        (IMAGES, "shard=2,recompute"),
        (IMAGES, "engine=textbook,replicate=2"),
        (Tokens(samples=60), "tensor=2"),
        (NORMED, "replicate=2"),
        (DROPPING, "replicate=2"),
        (DROPPING, "shard=2,microbatches=3,recompute,dropout=whole"),
        (BOTH, "replicate=2"),
        (planted.With(samples=64, kind="gumbel"), "replicate=2"),
        (planted.With(samples=64, kind="attending", rule="adam"), "shard=2,microbatches=2"),
        (NORMED, "exact=8,replicate=2"),
        (BOTH, "exact=4,replicate=4"),
        (planted.With(samples=64, kind="shared"), "exact=4,replicate=2"),
        (DROPPING, "exact=4,shard=2"),
        (Views(samples=64), "replicate=2,microbatches=2"),
        (Pairs(samples=61, dropout=0.3), "exact=4,shard=2"),  # each piece has its own
        (Images(samples=32, epochs=1), "engine=lightning,replicate=2"),  # of fewer steps than verify takes
        (planted.Twice(samples=64), "replicate=3"),
        (Counted(samples=64), "replicate=2,microbatches=2"),
        (Chosen(samples=64), "shard=2"),
        (planted.With(samples=64, kind="spectral"), "replicate=2"),  # its buffers move with each forward
    ],
)
def test_what_has_no_fault_is_the_same(pool: Pool, task: Task, plan: str) -> None:
    assert verified(pool, task, plan).verdict == "same"


def test_draws_that_are_the_same_are_not_blamed(pool: Pool, tmp_path: Path) -> None:
    """channels_last sums in another order, which decides ties of max pooling and ReLU at step 4, with dropout on."""
    text = (gallery_files.FOLDER / "image_classification.py").read_text()
    before, after = "nn.Flatten(), ", "nn.Flatten(), nn.Dropout(0.2), "
    assert before in text
    (tmp_path / "dropped.py").write_text(text.replace(before, after))
    [found] = verify(str(tmp_path / "dropped.py"), ["channels_last,threads=1"], run=planted.runner(pool), steps=4)
    assert found.verdict in ("same", "cannot be judged")
    assert not any("dropout" in cause or "meet" in cause for cause in found.causes), found.causes


def test_a_fault_in_a_loss_of_the_whole_batch_is_found(pool: Pool) -> None:
    found = verified(pool, Views(samples=64), "replicate=2", "larger_gradient_of_the_whole_batch")
    assert found.verdict == "different"
    assert not any("sample" in cause for cause in found.causes), found.causes


@pytest.mark.parametrize(
    ("task", "plan", "causes"),
    [
        (NORMED, "replicate=2,batchnorm=local", ["batch normalisation (0.1)"]),
        (NORMED, "shard=2,microbatches=2,batchnorm=local", ["batch normalisation (0.1)"]),
        (NORMED, "engine=textbook,replicate=3", ["batch normalisation (0.1)"]),
        (DROPPING, "replicate=2,dropout=local", ["dropout's random streams (bernoulli_); dropout=whole would"]),
        (DROPPING, "replicate=2,microbatches=3", ["dropout's random streams (bernoulli_)"]),  # six parts
        (BOTH, "replicate=2,batchnorm=local", ["batch normalisation (0.1)"]),
        (
            BOTH,
            "replicate=2,batchnorm=local,dropout=local",
            ["batch normalisation (0.1)", "dropout's random streams (bernoulli_)"],
        ),
        (BOTH, "shard=2,batchnorm=local,precision=bf16", ["precision (bf16)", "batch normalisation (0.1)"]),
        (IMAGES, "replicate=2,precision=fp16", ["precision (fp16)"]),
        (planted.Whitened(samples=64), "replicate=2", ["statistics of the batch in planted.py:"]),
    ],
)
def test_what_was_asked_for_is_the_same_but_for_that(pool: Pool, task: Task, plan: str, causes: list[str]) -> None:
    found = verified(pool, task, plan)
    assert found.verdict == "same but for these"
    assert len(found.causes) == len(causes), found.causes
    assert all(one.startswith(wanted) for one, wanted in zip(found.causes, causes, strict=True)), found.causes


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2,microbatches=2", "engine=textbook,replicate=2"])
@pytest.mark.parametrize("name", TASKS)
def test_batches_that_are_no_stacks_of_rows_are_judged(pool: Pool, name: str, plan: str) -> None:
    found = verified(pool, TASKS[name](), plan)
    assert found.verdict == "same"
    assert found.difference is not None and found.difference.tolerated < 1e-3


@pytest.mark.parametrize(
    ("task", "plan", "fault", "cause"),
    [
        (Graphs(), "replicate=2", "larger_loss", "not found"),
        (Boxes(), "replicate=2", "larger_loss", "not found"),
        (Texts(), "replicate=2", "larger_loss", "not found"),
        (Graphs(rule="sgd"), "replicate=2", "larger_gradient", "not found"),
        (Graphs(), "replicate=2", "shuffled_targets", "not found"),
        (Boxes(), "replicate=2", "shuffled_targets", "not found"),
        (Graphs(), "replicate=2", "means_of_means", "^means of slices are averaged"),
        (Graphs(), "replicate=2", "silent_bf16", "^a lower precision"),
        (Boxes(), "replicate=2,microbatches=2", "no_division_by_microbatches", "^accumulation"),
        (Graphs(), "replicate=2", "off_by_one", "^a sampler that is off by 1"),
        (Texts(), "replicate=2", "doubled_sample", "^a doubled sample"),
        (Boxes(), "replicate=2", "dropped_last_batch", "^a dropped last batch"),
        (Graphs(dropout=0.4), "replicate=2", "alike_dropout", "several slices draw the same"),
        (Graphs(dropout=0.4), "replicate=2", "still_dropout", "the step before"),
    ],
)
def test_a_fault_is_found_on_batches_that_are_no_stacks_of_rows(
    pool: Pool, task: Task, plan: str, fault: str, cause: str
) -> None:
    found = verified(pool, task, plan, fault)
    assert found.verdict == "different"
    assert re.search(cause, found.causes[0]), found.causes


def test_graphs_batch_normalisation_is_named(pool: Pool) -> None:
    found = verified(pool, Graphs(batchnorm=True), "replicate=2,batchnorm=local")
    assert (found.verdict, found.causes) == ("same but for these", ("batch normalisation (norm)",))


def test_what_drifts_by_itself_cannot_be_judged(pool: Pool) -> None:
    found = verified(pool, planted.Placed(), "replicate=2")
    assert found.verdict == "cannot be judged" and not found.learns_the_same
    assert "another order" in found.causes[0] and "places" in found.causes[1]


@pytest.mark.parametrize("samples", [64, 61])
def test_a_pipeline_of_several_microbatches_is_the_same(pool: Pool, samples: int) -> None:
    assert verified(pool, Images(samples=samples), "pipeline=2,microbatches=4").verdict == "same"


@pytest.mark.parametrize(
    ("task", "plan"),
    [
        (StagedTexts(samples=61), "pipeline=2,microbatches=4"),
        (StagedTexts(samples=61), "pipeline=2,microbatches=3,shard=2"),
        (StagedTexts(samples=61), "pipeline=2,microbatches=2,replicate=2"),
        (StagedBoxes(samples=61), "pipeline=2,microbatches=4"),
    ],
)
def test_a_pipelines_microbatches_are_padded_to_the_steps_longest(pool: Pool, task: Task, plan: str) -> None:
    assert verified(pool, task, plan).verdict == "same"


def test_a_pipeline_differs_by_its_batch_normalisation_alone(pool: Pool) -> None:
    found = verified(pool, NORMED, "pipeline=2,microbatches=2")
    assert (found.verdict, found.causes) == ("same but for these", ("batch normalisation (0.1)",))


VAE = str(Path(__file__).parents[3] / "examples/gallery/vae.py")


@pytest.mark.slow
def test_one_plans_failure_leaves_the_others_their_rows(capfd: pytest.CaptureFixture) -> None:
    found = list(verify(VAE, ["tensor=2", "threads=1"], steps=2, note=progress))
    assert [one.verdict for one in found] == ["failed", "same"]
    assert "tensor_plan" in found[0].causes[0]
    assert "tensor_plan" in repr(found[0]) and len(repr(found[1])) < 100
    assert [len(verdict_cells(one)) for one in found] == [len(COLUMNS)] * 2
    assert "one plain process\ntensor=2\n" in capfd.readouterr().err
