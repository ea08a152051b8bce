"""Remedies: what is known of an exception's text."""

import pytest
import torchmetrics

from grappe.errors.remedies import SCRIPTS, remedy


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("torch.distributed.pipeline", "pipeline=2,microbatches=8"),
        ("horovod", "docs/horovod.md"),
        ("horovod.torch", "docs/horovod.md"),
        ("torchtext", "ends at torch 2.3"),
        ("torchtexts", ""),
    ],
)
def test_modules_of_older_libraries_are_answered(module: str, says: str) -> None:
    text = f"No module named '{module}'"
    assert says in remedy(text, SCRIPTS) and bool(remedy(text, SCRIPTS)) == bool(says)
    assert says in remedy(text) and remedy(text)


def test_a_metric_without_its_task_is_answered() -> None:
    with pytest.raises(TypeError) as error:
        torchmetrics.Accuracy()  # type: ignore[call-arg]
    assert "Accuracy(task='multiclass'" in remedy(str(error.value), SCRIPTS)


def test_a_process_group_of_the_scripts_own_is_answered() -> None:
    assert "is for 1, and there are more" in remedy("gloo/context.cc:23] rank < size. 1 vs 1", SCRIPTS)
    assert "SLURM_PROCID" in remedy("port: 3456, code: -98, name: EADDRINUSE, message: in use", SCRIPTS)
