"""Without torch._dynamo torch's optimizers do the same to the bit, and once it is loaded they are torch's own again.

Nor is DTensor loaded by what one process imports.
"""

import subprocess
import sys

import pytest
import torch

from grappe.private_api import torch_dynamo

SCRIPT = """
import hashlib, sys, torch
with_torch = set(sys.modules)
from torch import nn
from torch.optim import SGD, AdamW, RMSprop, lr_scheduler

class Derived(SGD):
    def step(self, closure=None):
        return super().step(closure)

def learned(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    made = kind(model.parameters(), lr=0.01)
    schedule = lr_scheduler.StepLR(made, 2, 0.5)
    for _ in range(4):
        made.zero_grad()
        model(torch.randn(5, 6)).square().sum().backward()
        made.step()
        schedule.step()
    made.load_state_dict(made.state_dict())
    assert torch.is_grad_enabled()
    return [one.detach().numpy().tobytes() for one in model.parameters()]

def all_learned():
    return hashlib.sha256(b"".join(b"".join(learned(kind)) for kind in (SGD, AdamW, RMSprop, Derived))).hexdigest()

from grappe.private_api import torch_dynamo
torch_dynamo.leave_unloaded()
import grappe.engines.native, grappe.tasks.digits, grappe.training.worker
from grappe.private_api.torch import give_own_memory
give_own_memory(nn.Linear(1, 1, device="meta"), torch.device("cpu"))
# More than a second, which a training on one process has no use for.
assert not {"torch.distributed.tensor", "sympy"} & (set(sys.modules) - with_torch)
import torch.distributed.tensor.parallel
loaded_by_torch = "torch._dynamo" in sys.modules  # so does torch 2.8
from grappe.engines.shared.watched_forward import InPlaceWrites
without = all_learned()
with InPlaceWrites(nn.Linear(1, 1), print):
    torch.ones(2) + 1
assert loaded_by_torch or "torch._dynamo" not in sys.modules
import torch._dynamo
assert all_learned() == without
assert vars(torch.optim.Optimizer.zero_grad.__wrapped__)["__dynamo_disable"].__module__.startswith("torch.")
print("the same")
"""


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_torch_wraps_a_step_as_known(kind: type[torch.optim.Optimizer]) -> None:
    """Else the file is of no use: a new torch may be wrapped otherwise, and loads torch._dynamo as before."""
    step = vars(kind)["step"]
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    assert torch_dynamo.is_wrapped(step)


@pytest.mark.parametrize("name", torch_dynamo.METHODS)
def test_torch_disables_a_compiler_as_known(name: str) -> None:
    assert hasattr(getattr(torch.optim.Optimizer, name), "__wrapped__")


@pytest.mark.slow
def test_the_same_bits_without_it_and_torchs_own_once_it_is_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.stdout == "the same\n", done.stderr
