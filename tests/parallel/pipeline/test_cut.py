"""Tests of the cuts between stages, and of refused cuts."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from grappe.errors import PlanError, TaskError
from grappe.parallel.pipeline.cut import (
    balanced,
    check_units,
    check_without_values,
    cut_into_stages,
    pipeline_units,
    work,
)
from grappe.task import Task
from tests.parity.tasks import Images, Tokens, Words

CALL = Images().forward
IMAGES = torch.zeros(2, 3, 8, 8)


def largest(costs: list[float], first: tuple[int, ...]) -> float:
    bounds = [0, *first, len(costs)]
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds))


def test_no_other_cut_has_a_smaller_largest_stage() -> None:
    draw = random.Random(1)
    for _ in range(40):
        costs = [draw.choice([0.0, 1.0, draw.random() * 10]) for _ in range(draw.randint(2, 9))]
        stages = draw.randint(2, len(costs))
        best = min(largest(costs, one) for one in itertools.combinations(range(1, len(costs)), stages - 1))
        found = balanced(costs, stages)
        assert len(found) == stages - 1 and sorted(set(found)) == found
        assert largest(costs, tuple(found)) == pytest.approx(best)


def test_work_is_counted_by_the_operations_of_a_forward() -> None:
    with torch.device("meta"):
        units = list(Images().model())
    costs = work(units, IMAGES, CALL)
    assert costs[0] == 2 * 2 * 8 * 8 * (8 * 27) + 8 * 28 + 2 * 8 * 64  # products twice, numbers held, numbers given
    assert costs[1] > costs[0] / 4 > costs[3]


def test_without_an_example_and_where_values_are_looked_at_work_is_what_is_held() -> None:
    class Looks(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    assert work([nn.Linear(3, 4), nn.ReLU()], None, CALL) == [16.0, 0.0]
    with torch.device("meta"):
        units = [Looks(3, 3), Looks(3, 3)]
    assert work(units, torch.ones(2, 3), CALL) == [12.0, 12.0]


class Told(Images):
    """Cut where it says."""

    where: str = "1"

    def cuts(self, stages: int):
        return [int(number) for number in self.where.split()]


def test_the_modules_of_a_sequential_are_its_units() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    assert pipeline_units(Task(), model) == list(model)
    with pytest.raises(PlanError, match=r"Task has no units\(model\)"):
        pipeline_units(Task(), type("Other", (nn.Sequential,), {})(nn.Linear(2, 2)))  # whose forward may be another


def test_the_task_says_where() -> None:
    task = Told(where="3")
    assert cut_into_stages(task, task.model(), 2, IMAGES) == (range(3), range(3, 4))


@pytest.mark.parametrize(("where", "stages"), [("4", 2), ("0", 2), ("2 1", 3), ("1 1", 3), ("1", 3), ("-1", 2)])
def test_a_cut_that_does_not_exist_is_refused(where: str, stages: int) -> None:
    task = Told(where=where)
    with pytest.raises(TaskError, match=rf"cuts\({stages}\) gave .* of 4 units it must give {stages - 1} rising"):
        cut_into_stages(task, task.model(), stages, IMAGES)


class Whole(Images):
    """Without units."""

    def units(self, model):
        return ()


class Tied(Images):
    """Model whose head is its embedding."""

    def model(self):
        model = Words(8, 2)
        model.head.weight = model.embed.weight
        return model

    def units(self, model):
        return [model.embed, *model.blocks, model.head]


@pytest.mark.parametrize(
    ("task", "stages", "example", "words"),
    [
        (Images(), 5, IMAGES, "Images has 4 units, too few for 5 stages: use pipeline=4 or less"),
        (Whole(), 2, IMAGES, r"Whole has no units\(model\). Define it to return the blocks"),
        (Images(unused=True), 2, IMAGES, r"units\(\) are not the whole model, as a pipeline needs: spare is in none"),
        (Tied(), 2, torch.zeros(2, 5, dtype=torch.int64), "embed.weight is shared by stages 1 and 2"),
    ],
)
def test_what_cannot_be_cut_is_refused(task: Images, stages: int, example: torch.Tensor, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        cut_into_stages(task, task.model(), stages, example)


def test_parameters_shared_within_a_stage_are_not() -> None:
    class Near(Images):
        def model(self):
            model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
            model[1].weight = model[0].weight
            return model

        def cuts(self, stages):
            return [2]

    assert cut_into_stages(Near(), Near().model(), 2, None) == (range(2), range(2, 4))


RANDOM_IMAGES = torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize("task", [Images(), Images(dropout=0.5), Images(batchnorm=True), Tokens()])
def test_units_that_are_the_model_pass(task: Images | Tokens) -> None:
    check_units(task, torch.randint(0, 11, (2, 9)) if isinstance(task, Tokens) else RANDOM_IMAGES)


def test_units_in_float64_pass() -> None:
    check_units(Images(), RANDOM_IMAGES.double(), torch.float64)


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

    with pytest.raises(PlanError, match=r"units\(\), one after the other, do not compute what the model computes"):
        check_units(Beside(), RANDOM_IMAGES)


def test_units_that_do_not_fit_each_other_are_found() -> None:
    class Odd(Images):
        def model(self) -> nn.Module:
            return Flattened(nn.Conv2d(3, 4, 8), nn.Linear(4, 5))

    with pytest.raises(PlanError, match=r"each on the previous unit.s output, which fails: RuntimeError"):
        check_units(Odd(), RANDOM_IMAGES)


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
    check_units(Towers(), RANDOM_IMAGES)
    check_without_values(Towers(), Branches().train(), RANDOM_IMAGES)


def test_without_values_another_order_and_other_inputs_are_found() -> None:
    class Crossed(Towers):
        def model(self) -> nn.Module:
            return Branches(crossed=True)

    class Swapped(Towers):
        def model(self) -> nn.Module:
            return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

        def units(self, model: nn.Module) -> list[nn.Module]:
            return [model[0], model[2], model[1]]  # type: ignore[index]

    for task, example in ((Crossed(), RANDOM_IMAGES), (Swapped(), torch.randn(2, 8))):
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


@pytest.mark.parametrize("padding", [0, 3])
def test_the_units_of_a_language_model_see_no_later_word(padding: int) -> None:
    """transformers gives its layers no mask where nothing is padding: stages exchange one all the same."""
    pytest.importorskip("transformers")
    from tests.parallel.families import Llama

    task = Llama()
    model = task.model().eval()
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[0, 8 - padding :] = 0
    inputs = {"input_ids": torch.arange(16).view(2, 8), "attention_mask": mask}
    expected = task.forward(model, inputs).logits
    first, *others = pipeline_units(task, model)
    value = task.forward(first, inputs)
    for unit in others:
        value = unit(value)
    torch.testing.assert_close(value.logits, expected)
