"""Tests of tasks: definitions that work, and definitions that are refused."""

import dataclasses

import pytest
import torch

from grappe import Task
from grappe.errors import TaskError, UsageError
from grappe.finder import find, make, names
from grappe.task import check_signatures


class Small(Task):
    """A task with a field of each type."""

    lr: float = 0.1
    deep: bool = False
    width: int | None = None
    kind: str = "plain"


def test_a_subclass_becomes_a_keyword_only_frozen_dataclass() -> None:
    task = Small(lr=0.2, epochs=3)
    assert (task.lr, task.epochs, task.batch_size) == (0.2, 3, 256)
    with pytest.raises(dataclasses.FrozenInstanceError):
        task.lr = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        Small(0.2)  # type: ignore[misc]


def test_fields_are_read_from_text() -> None:
    task = make(Small, {"lr": "1e-3", "deep": "true", "width": "none", "kind": "x", "epochs": "2"})
    assert task == Small(lr=1e-3, deep=True, width=None, kind="x", epochs=2)
    assert make(Small, {"width": "12"}).width == 12


@pytest.mark.parametrize(
    ("texts", "words"),
    [({"lrr": "1"}, "did you mean lr"), ({"epochs": "2.5"}, "whole number"), ({"epochs": "0"}, "at least 1")],
)
def test_wrong_fields_are_refused(texts: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make(Small, texts)


def test_a_field_may_not_hide_a_method() -> None:
    with pytest.raises(TaskError, match="field 'model' hides the method"):
        type("Hides", (Task,), {"__annotations__": {"model": str}, "model": "resnet"})


def test_clip_must_be_above_zero_and_a_text_is_no_number() -> None:
    with pytest.raises(TaskError, match="above 0"):
        Small(clip=0.0)
    with pytest.raises(UsageError, match="Small: lr='x' is a text, and not a number"):
        Small(lr="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", names())
def test_shipped_tasks_are_found_and_say_what_they_learn(name: str) -> None:
    cls = find(name)
    assert issubclass(cls, Task)
    assert (cls.__doc__ or "").strip()
    assert make(cls, {"epochs": "1"}).epochs == 1


def test_tasks_are_found_by_path_and_by_module(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from grappe import Task\nclass One(Task):\n    '''One.'''\nclass Two(Task):\n    lr: float = 3\n")
    assert find(f"{file}:Two")().lr == 3
    assert find("tests.parity.tasks:Images").__name__ == "Images"
    with pytest.raises(TaskError, match=r"has several tasks: One, Two\. Say which, as in mine\.py:One"):
        find(str(file))
    with pytest.raises(TaskError, match="did you mean digits"):
        find("digit")


def test_what_a_file_draws_is_the_same_wherever_it_is_loaded(tmp_path) -> None:
    file = tmp_path / "drawing.py"
    file.write_text(
        "import random, numpy, torch\nfrom grappe import Task\nclass Mine(Task):\n"
        "    drawn = (random.random(), numpy.random.rand(), torch.rand(1).item())\n"
    )
    torch.manual_seed(1)
    before = torch.default_generator.get_state()
    first = find(str(file)).drawn
    assert torch.equal(torch.default_generator.get_state(), before)
    torch.manual_seed(2)
    assert find(str(file)).drawn == first


def test_a_method_that_cannot_be_called_is_refused() -> None:
    class Right(Task):
        def augment(self, inputs, targets, keys, training):
            return inputs, targets

        def loss(self, *both):
            return both[0]

    class Wrong(Task):
        def augment(self, inputs, targets, keys, probability):
            return inputs, targets

    check_signatures(Right())
    with pytest.raises(TaskError, match=r"missing a required argument: 'probability'.*test_task.py, line"):
        check_signatures(Wrong())


def test_a_field_needs_its_type() -> None:
    with pytest.raises(TaskError, match=r"write epochs: int = 3 \(.*test_task.py, line"):

        class Wrong(Task):
            epochs = 3
