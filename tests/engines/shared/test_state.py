"""Checks where a restored optimizer has its numbers: as torch's own load_state_dict puts them."""

import pytest
import torch
from torch import nn

from grappe.checkpoint.weights import InMemory
from grappe.engines.shared.state import ModelState, SavedState
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World

PROCESS = ProcessRank(rank=0, size=1, local_rank=0, local_size=1, job="state")


@pytest.mark.parametrize(("option", "device"), [("fused", "meta"), ("capturable", "meta"), ("foreach", "cpu")])
def test_a_step_counter_is_where_the_optimizer_reads_it(option: str, device: str) -> None:
    model = nn.Linear(2, 2, device="meta")  # the meta device in place of a GPU's
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups[0][option] = True
    names = [name for name, _ in model.named_parameters()]
    saved = {f"optimizer.{name}.step": torch.tensor(3.0) for name in names}
    saved |= {f"optimizer.{name}.scale": torch.tensor(2.0) for name in names}
    state = ModelState(
        model=model, optimizer=optimizer, schedule=None, world=World(process=PROCESS, device=torch.device("meta"))
    )
    state.restore(SavedState(tensors=InMemory(saved), values={}, model_loaded=True))
    for entries in optimizer.state.values():
        assert entries["step"].device.type == device
        assert entries["scale"].device.type == "meta"
