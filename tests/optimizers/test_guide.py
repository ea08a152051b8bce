"""The guide's pieces of code, run: docs/optimizers.md."""

import re
from pathlib import Path

import pytest
import torch

import grappe
from grappe.tasks.digits import Digits

GUIDE = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
BLOCKS = re.findall(r"```python\n(def optimizer.*?)```", GUIDE, re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: code.splitlines()[-2].split("(")[0].split(".")[-1])
def test_a_piece_of_code_takes_a_step(code: str) -> None:
    names = {"grappe": grappe, "torch": torch}
    exec(code, names)
    task = Digits()
    model = task.model()
    optimizer = names["optimizer"](task, model.named_parameters())
    before = [parameter.clone() for parameter in model.parameters()]
    inputs = torch.randn(2, 1, 8, 8)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().sum()
        loss.backward()
        return loss

    closure()
    optimizer.step(closure) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()
    assert all(not torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


def test_there_are_some() -> None:
    assert len(BLOCKS) == 4
