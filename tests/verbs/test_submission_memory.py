"""A training whose peak does not fit a site's GPUs is said before it is queued, with a plan that fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from grappe.verbs.submission import JobOptions, Submission
from grappe.verbs.submission_memory import memory_warnings

BIG = """
import grappe, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

class Big(grappe.Task):
    width: int = 8192
    batch_size: int = 16
    reads: bool = False

    def model(self):
        return nn.Sequential(*(nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(40)))

    def forward(self, model, inputs):
        if self.reads and inputs.sum().item() > 0:
            inputs = inputs + 1
        return model(inputs)

    def data(self, split, folder):
        return TensorDataset(torch.zeros(16, self.width), torch.zeros(16, self.width))

    def loss(self, output, target):
        return F.mse_loss(output, target, reduction="none").mean(1)

    def optimizer(self, named_parameters):
        return torch.optim.AdamW(named_parameters, lr=1e-3)

    def units(self, model):
        return list(model)
"""


@pytest.mark.parametrize(
    ("site", "plan", "fields", "says"),
    [
        ("narval", "replicate=4", (), "each process needs 60.6 GB, and narval's A100, 40 GB has 40.0 GB"),
        ("narval", "replicate=4", (), "--plan shard=4,zero=1 fits, with "),
        ("narval", "", (), "no plan of as many GPUs fits"),
        ("narval", "shard=4", (), None),
        ("narval", "replicate=4", ("width=8",), None),
        ("narval", "replicate=4", ("reads=true",), "was not foreseen: "),
        ("narval-cpu", "device=cpu,replicate=4", (), None),  # no GPU's memory
    ],
)
def test_what_does_not_fit_is_said(
    tmp_path: Path, site: str, plan: str, fields: tuple[str, ...], says: str | None
) -> None:
    (tmp_path / "big.py").write_text(BIG)
    submission = Submission(
        task=str(tmp_path / "big.py"),
        arguments=(),
        plans=(plan,),
        fields=fields,
        job=JobOptions(site=site, account="def-me"),
    )
    found = list(memory_warnings(submission))
    assert len(found) == (says is not None)
    if says is not None:
        assert says in found[0]


def test_other_commands_and_unknown_tasks_are_left_to_the_scripts_own_checks(tmp_path: Path) -> None:
    job = JobOptions(site="narval", account="def-me")
    assert not list(memory_warnings(Submission(task=str(tmp_path / "no.py"), arguments=(), job=job)))
    assert not list(memory_warnings(Submission(command="measure", task="digits", arguments=(), job=job)))
