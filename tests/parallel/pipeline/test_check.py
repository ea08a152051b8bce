"""Units that are not the model are found before anything is trained."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from grappe.errors import PlanError
from grappe.parallel.pipeline.check import check_units, check_without_values
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


class Towers(Images):
    """Two branches, run one after the other, of which each unit has one layer each."""

    def model(self) -> nn.Module:
        return Branches()

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())


class Rung(nn.Module):
    def __init__(self, *, first: bool = False, last: bool = False) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.first, self.last = first, last

    def forward(self, x: tuple[torch.Tensor, ...] | torch.Tensor) -> tuple[torch.Tensor, ...] | torch.Tensor:
        a, b = (x.flatten(1)[:, :8],) * 2 if self.first else x
        a, b = self.left(a), self.right(b)
        return a + b if self.last else (a, b)


class Branches(nn.Module):
    """Rungs of two linear layers; `crossed`, a layer gets the other branch's output."""

    def __init__(self, *, crossed: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = Rung(first=True), Rung(), Rung(last=True)
        self.crossed = crossed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = right = x.flatten(1)[:, :8]
        left = self.b.left(self.a.left(left))
        right = self.b.right(self.a.right(right))
        if self.crossed:
            left, right = right, left
        return self.c.left(left) + self.c.right(right)


def test_without_values_branches_may_run_in_any_order() -> None:
    check_units(Towers(), IMAGES)
    check_without_values(Towers(), Branches().train(), IMAGES)


def test_without_values_another_order_and_other_inputs_are_found() -> None:
    class Crossed(Towers):
        def model(self) -> nn.Module:
            return Branches(crossed=True)

    class Swapped(Towers):
        def model(self) -> nn.Module:
            return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

        def units(self, model: nn.Module) -> list[nn.Module]:
            return [model[0], model[2], model[1]]  # type: ignore[index]

    for task, example in ((Crossed(), IMAGES), (Swapped(), torch.randn(2, 8))):
        for check in (check_units, lambda *given: check_without_values(given[0], given[0].model(), given[1])):
            with pytest.raises(PlanError, match="do not compute what the model computes"):
                check(task, example)


def test_without_values_a_module_that_only_one_run_calls_says_nothing() -> None:
    class Functional(Images):
        """The model uses the second layer's parameters, and does not call the layer."""

        def model(self) -> nn.Module:
            return Uncalled(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))

        def units(self, model: nn.Module) -> list[nn.Module]:
            return list(model.children())

    check_without_values(Functional(), Functional().model(), torch.randn(2, 8))


class Uncalled(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = F.linear(self[0](x), self[1].weight, self[1].bias)
        return self[2](middle)
