"""Units that are not the model are found before anything is trained."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from grappe.errors import PlanError
from grappe.parallel.pipeline.check import check_units
from tests.parity.tasks import Images, Tokens

IMAGES = torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize("task", [Images(), Images(dropout=0.5), Images(batchnorm=True)])
def test_units_that_are_the_model_pass(task: Images) -> None:
    check_units(task, IMAGES)


def test_tokens_pass() -> None:
    check_units(Tokens(), torch.randint(0, 11, (2, 9)))


class Scaled(nn.Sequential):
    """Does something beside its units."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.01


class Dropped(nn.Sequential):
    """Only in training: evaluation would not show it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.dropout(x, 0.5, self.training))


class Flattened(nn.Sequential):
    """Reshapes between two units."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](self[0](x).flatten(1))


@pytest.mark.parametrize("kind", [Scaled, Dropped])
def test_what_is_done_beside_the_units_is_found(kind: type[nn.Sequential]) -> None:
    class Beside(Images):
        def model(self) -> nn.Module:
            return kind(*super().model())

    with pytest.raises(
        PlanError, match=r"units\(\), one after the other, do not compute what the model computes"
    ):
        check_units(Beside(), IMAGES)


def test_units_that_do_not_fit_each_other_are_found() -> None:
    class Odd(Images):
        def model(self) -> nn.Module:
            return Flattened(nn.Conv2d(3, 4, 8), nn.Linear(4, 5))

    with pytest.raises(PlanError, match=r"each on the previous unit.s output, which fails: RuntimeError"):
        check_units(Odd(), IMAGES)
