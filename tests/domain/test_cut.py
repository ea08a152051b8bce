"""Cut tensors: what is refused of them before anything is sent, and which dimensions are cut by default."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grappe import Task
from grappe.domain.batches import cut_batch, dimensions
from grappe.domain.parts import Domain, cut
from grappe.engines.shared.watched_forward import AssignedData
from grappe.errors import PlanError, TaskError
from grappe.rows.tensor import Rows, local_rows


@pytest.fixture(autouse=True)
def second() -> Iterator[None]:
    """The second of two processes, which sends nothing."""
    domain = Domain(summed=None, rank=1, size=2)
    domain.enter()
    yield
    domain.leave()


def images() -> Rows:
    return cut(torch.arange(2.0 * 3 * 7 * 5).view(2, 3, 7, 5), 2).requires_grad_()


def test_a_part_shows_the_whole_shape() -> None:
    made = images()
    assert made.shape == (2, 3, 7, 5)
    assert made.size(2) == 7
    assert len(made) == 2
    assert local_rows(made).shape == (2, 3, 3, 5)  # the first part has the row more
    assert torch.equal(local_rows(made), torch.arange(210.0).view(2, 3, 7, 5)[:, :, 4:])
    assert (made + torch.ones(7, 5)).flatten(1).shape == (2, 105)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda x: x.cumsum(2), "cumsum"),
        (lambda x: torch.fft.fft(x, dim=2), "_fft"),
        (torch.linalg.inv, "_linalg|linalg"),
        (lambda x: x.detach().numpy(), "reading a tensor's numbers"),
        (lambda x: x.detach()[x > 0], "nonzero|index"),
        (lambda x: x.unfold(2, 3, 1), "unfold"),
        (lambda x: x.sort(2), "sort"),
        (lambda x: x[:, :, ::2], "slice"),
        (lambda x: F.avg_pool2d(x, 2, ceil_mode=True), "last window"),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), "bicubic"),
        (lambda x: x.detach()[:, :, 1:].add_(1), "a write to a view"),
        (lambda x: x.view(21, -1), "view"),
    ],
)
def test_a_function_without_a_rule_is_refused_with_its_name_and_the_line(run: Any, said: str) -> None:
    with pytest.raises(PlanError, match=rf"domain= has no rule for .*({said}).*test_cut\.py, line \d+"):
        run(images())


def test_a_view_is_not_read_when_its_tensor_was_written_to() -> None:
    image = images().detach()
    view = image[:, :, 3:5]
    image.add_(1)
    with pytest.raises(PlanError, match="a view whose tensor was written to since"):
        view + 1


def test_without_a_line_of_the_users_a_refusal_has_the_librarys(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "library.py"
    watching = AssignedData(nn.Module(), lambda *_: None)  # as in the engines: its frame is further in
    names: dict[str, Any] = {"torch": torch, "watching": watching}
    source = "def forward(x):\n    with watching:\n        return torch.sort(x, 2)\n"
    exec(compile(source, library, "exec"), names)
    with (
        ThreadPoolExecutor(1) as alone,
        pytest.raises(PlanError, match=r"sort\.default \(.*library\.py, line 3, in forward"),
    ):
        alone.submit(names["forward"], images()).result()


def test_a_process_without_a_part_is_refused() -> None:
    with pytest.raises(PlanError, match=r"length 1, which leaves a process without a part.*fewer than 2"):
        cut(torch.ones(2, 1), 1)


def shaped(*shape: int, whole: bool = False) -> Tensor:
    return torch.zeros(shape, dtype=torch.long) if whole else torch.zeros(shape)


def test_height_and_length_are_cut_without_a_word_of_the_task() -> None:
    task = Task()
    image = shaped(2, 3, 8, 6)
    assert dimensions(task, image, shaped(2, whole=True)) == (2, None)
    assert dimensions(task, image, shaped(2, 8, 6, whole=True)) == (2, 1)
    assert dimensions(task, image, shaped(2, 1, 8, 6)) == (2, 2)
    assert dimensions(task, shaped(2, 1, 4, 8, 6), shaped(2, 4, 8, 6, whole=True)) == (2, 1)
    assert dimensions(task, image.byte(), shaped(2, whole=True)) == (2, None)  # as photographs are stored
    tokens = {"ids": shaped(2, 9, whole=True), "mask": shaped(2, 9)}
    assert dimensions(task, tokens, shaped(2, 9, whole=True)) == ({"ids": 1, "mask": 1}, 1)
    with pytest.raises(PlanError, match=r"float32 \[2, 5\]: tell in the task's domain"):
        dimensions(task, shaped(2, 5), shaped(2, whole=True))


def test_the_task_says_what_is_cut() -> None:
    class Wide(Task):
        def domain(self, inputs: Any, targets: Any) -> Any:
            return 3, None

    inputs, targets = cut_batch(Wide(), shaped(2, 3, 4, 6), shaped(2, whole=True))
    assert inputs.shape == (2, 3, 4, 6)
    assert local_rows(inputs).shape == (2, 3, 4, 3)
    assert type(targets) is Tensor

    class Nothing(Task):
        def domain(self, inputs: Any, targets: Any) -> Any:
            return None, None

    with pytest.raises(TaskError, match=r"one at least must be cut"):
        cut_batch(Nothing(), shaped(2, 3, 4, 6), shaped(2, whole=True))
