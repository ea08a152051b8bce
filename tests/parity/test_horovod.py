"""The horovod engine beside the cover: where it is not built, and rows of padding."""

import importlib.util

import pytest
import torch

from grappe.contrib.horovod.engine import MISSING, Horovod
from grappe.errors import PlanError
from grappe.plan import Plan
from tests.parity.tasks import Images
from tests.processes import Pool


def test_where_it_is_not_built_the_way_to_build_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from grappe import engines

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match="make horovod"):
        engines.check(Plan.parse("engine=horovod,replicate=2"))
    assert "CVE" in MISSING and "CVE" in Horovod.about


def test_rows_of_padding_do_not_enter_batch_normalisation(pool: Pool) -> None:
    """A step of one sample in two microbatches: the second one is a row of padding."""
    task = Images(batchnorm=True, samples=1, batch_size=1, epochs=1)
    [padded] = pool.run("tests.parity.cell:train", 1, task, "engine=horovod,microbatches=2", 1)
    [plain] = pool.run("tests.parity.cell:train", 1, task, "engine=horovod", 1)
    buffers = {name: value for name, value in plain["weights"].items() if name.startswith("0.1.")}
    assert buffers["0.1.num_batches_tracked"] == 1
    for name, value in buffers.items():
        assert torch.equal(padded["weights"][name], value), name
