"""Tests of the cuts between stages, and of refused cuts."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn

from grappe.errors import PlanError, TaskError
from grappe.parallel.pipeline.cut import balanced, cut, work
from tests.parity.tasks import Images, Words

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
    assert (
        costs[0] == 2 * 2 * 8 * 8 * (8 * 27) + 8 * 28 + 2 * 8 * 64
    )  # products twice, numbers held, numbers given
    assert costs[1] > costs[0] / 4 > costs[3]


def test_without_an_example_work_is_what_is_held() -> None:
    assert work([nn.Linear(3, 4), nn.ReLU()], None, CALL) == [16.0, 0.0]


def test_units_that_look_at_values_are_judged_by_what_they_hold() -> None:
    class Looks(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    with torch.device("meta"):
        units = [Looks(3, 3), Looks(3, 3)]
    assert work(units, torch.ones(2, 3), CALL) == [12.0, 12.0]


class Told(Images):
    """Cut where it says."""

    where: str = "1"

    def cuts(self, stages: int):
        return [int(number) for number in self.where.split()]


def test_the_task_says_where() -> None:
    task = Told(where="3")
    assert cut(task, task.model(), 2, IMAGES) == (range(3), range(3, 4))


@pytest.mark.parametrize(
    ("where", "stages"), [("4", 2), ("0", 2), ("2 1", 3), ("1 1", 3), ("1", 3), ("-1", 2)]
)
def test_a_cut_that_does_not_exist_is_refused(where: str, stages: int) -> None:
    task = Told(where=where)
    with pytest.raises(
        TaskError, match=rf"cuts\({stages}\) gave .* of 4 units it must give {stages - 1} rising"
    ):
        cut(task, task.model(), stages, IMAGES)


def test_more_stages_than_units_are_refused() -> None:
    with pytest.raises(PlanError, match="Images has 4 units, too few for 5 stages: use pipeline=4 or less"):
        cut(Images(), Images().model(), 5, IMAGES)


class Whole(Images):
    """Without units."""

    def units(self, model):
        return ()


def test_no_units_are_refused_with_the_way_to_give_them() -> None:
    with pytest.raises(
        PlanError, match=r"Whole does not say what its model is made of. Give it units\(model\)"
    ):
        cut(Whole(), Whole().model(), 2, IMAGES)


def test_parameters_outside_the_units_are_refused() -> None:
    task = Images(unused=True)
    with pytest.raises(
        PlanError, match=r"units\(\) are not the whole model, as a pipeline needs: spare is in none"
    ):
        cut(task, task.model(), 2, IMAGES)


class Tied(Images):
    """Model whose head is its embedding."""

    def model(self):
        model = Words(8, 2)
        model.head.weight = model.embed.weight
        return model

    def units(self, model):
        return [model.embed, *model.blocks, model.head]


def test_parameters_shared_between_stages_are_refused() -> None:
    with pytest.raises(PlanError, match=r"embed.weight is shared by stages 1 and 2"):
        cut(Tied(), Tied().model(), 2, torch.zeros(2, 5, dtype=torch.int64))


def test_parameters_shared_within_a_stage_are_not() -> None:
    class Near(Images):
        def model(self):
            model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
            model[1].weight = model[0].weight
            return model

        def cuts(self, stages):
            return [2]

    assert cut(Near(), Near().model(), 2, None) == (range(2), range(2, 4))
