"""Parameter groups by name."""

import pytest
import torch
from torch import nn

from grappe.errors import TaskError
from grappe.optimizers import by_name


def test_the_first_rule_that_matches_decides_and_what_none_matches_comes_first() -> None:
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    rules = {"*.bias": {"weight_decay": 0.0}, "head.*": {"lr": 0.5}}
    optimizer = torch.optim.SGD(by_name(model.named_parameters(), rules), lr=0.1, weight_decay=0.01)
    found = [(group["param_names"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert found == [(["body.weight"], 0.1, 0.01), (["body.bias", "head.bias"], 0.1, 0.0), (["head.weight"], 0.5, 0.01)]


def test_a_rule_leaves_no_empty_group_and_must_match_something() -> None:
    assert len(by_name(nn.Linear(2, 2).named_parameters(), {"*": {}})) == 1
    with pytest.raises(TaskError) as caught:
        by_name(nn.Linear(2, 2).named_parameters(), {"wieght": {}})
    assert "'wieght'" in str(caught.value)
    assert "weight" in str(caught.value)
