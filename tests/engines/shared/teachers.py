"""Tasks with a teacher that follows its student: in after_step, in forward, and in ways that are refused."""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from grappe import Arrays, Task
from grappe.errors import GrappeError
from grappe.launch.rank import ProcessRank
from tests.parity import cell


class Pair(nn.Module):
    """A student and a copy of it, which no optimizer trains."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        for parameter in self.teacher.parameters():  # else what moves it in a dry run would not show
            parameter.data.mul_(0.5)
        self.register_buffer("seen", torch.zeros(4))
        self._way = way

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            for target, source in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                if self._way == "forward":
                    target.lerp_(source, 0.2)
                elif self._way == "forward_data":
                    target.data = target.data * 0.8 + source.data * 0.2
            if self._way == "codebook":
                self.teacher[2].bias.copy_(x[:, :4].mean(0))
        with torch.no_grad():
            said = self.teacher(x)
        if self._way == "statistics":
            self.seen += said.detach().sum(0)
        return self.student(x), said


class Distilled(Task):
    """Learns classes, and what its teacher says; 29 samples in batches of 12."""

    epochs: int = 2
    batch_size: int = 12
    way: str = "lerp"
    """Movement of the teacher, or what after_step does otherwise."""

    def model(self) -> nn.Module:
        return Pair(self.way)

    def data(self, split: str, folder: Path) -> Arrays:
        generator = torch.Generator().manual_seed(3)
        return Arrays(torch.randn(29, 6, generator=generator), torch.randint(0, 4, (29,), generator=generator))

    def loss(self, output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        own, said = output
        return F.cross_entropy(own, target, reduction="none") + (own - said).square().sum(1)

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.3, momentum=0.9)

    def units(self, model: nn.Module) -> list[nn.Module]:
        return [*model.student, *model.teacher]

    def tensor_plan(self, model: nn.Module):
        return {
            f"{name}.{layer}": style()
            for name in ("student", "teacher")
            for layer, style in ((0, ColwiseParallel), (2, RowwiseParallel))
        }

    def after_step(self, model: nn.Module) -> None:
        pairs = list(zip(model.teacher.parameters(), model.student.parameters(), strict=True))
        if self.way == "foreach":
            torch._foreach_lerp_([t for t, _ in pairs], [s for _, s in pairs], 0.2)
        for target, source in pairs:
            if self.way == "lerp":
                target.lerp_(source, 0.2)
            elif self.way == "data":  # as MoCo's own code does
                target.data = target.data * 0.8 + source.data * 0.2
            elif self.way == "noise":
                target.add_(torch.randn_like(target), alpha=0.01)
            elif self.way == "statistics":
                target.add_(model.seen.sum())
            elif self.way == "shape":
                target.data = source.data[:1]
            elif self.way == "fails":
                target.copy_(torch.zeros(3))
        if self.way == "other":
            model.teacher = copy.deepcopy(model.student)


class Written(Distilled):
    """Mean teacher that moves in forward."""

    way: str = "forward"
    after_step = Task.after_step


def train(process: ProcessRank, rendezvous_folder: Path, task: Task, plan: str, steps: int) -> Any:
    """As tests.parity.cell.train; returns the message where the task is refused, on every process."""
    try:
        return cell.train(process, rendezvous_folder, task, plan, steps)
    except GrappeError as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        return f"{type(error).__name__}: {error}"
