"""Tasks whose optimizers look at whole parameters, or evaluate other weights than they train."""

from typing import Any, Literal

import torch
from torch import nn

from grappe import optimizers
from tests.parity.tasks import Images, Tokens

RULES = ("lars", "larc", "lamb", "muon")
Rule = Literal["lars", "larc", "lamb", "muon", "schedule-free", "lbfgs", "sam"]


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation (Foret et al. 2021, arXiv:2010.01412), as it is usually copied (davda54/sam).

    Its step asks for the gradients before it, and asserts that there is a closure; it replaces `p.data`; the state that
    counts is that of an optimizer which it wraps.
    """

    def __init__(self, params: Any, base_optimizer: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base_optimizer(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norms = [p.grad.norm(p=2) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.norm(torch.stack(norms), p=2)
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * scale)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD as its authors publish it (Defazio et al. 2024, arXiv:2405.15682), without its options.

    As theirs, it counts in its parameter groups, refuses to step when it is not in training mode, and computes the
    weights to train from those to evaluate, with rounding.
    """

    def __init__(self, params: Any, lr: float = 0.3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "weight_sum": 0.0, "train_mode": False})

    @torch.no_grad()
    def _move(self, weight_of: Any, training: bool) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["train_mode"] != training else ():
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], weight_of(group["beta"]))
            group["train_mode"] = training

    def eval(self) -> None:
        self._move(lambda beta: 1 - 1 / beta, False)

    def train(self) -> None:
        self._move(lambda beta: 1 - beta, True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            assert group["train_mode"], "not in train mode"
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2 * group["k"]
            share = group["lr"] ** 2 * group["k"] / group["weight_sum"]
            for y in group["params"]:
                if y.grad is None:
                    continue
                if "z" not in self.state[y]:
                    self.state[y]["z"] = y.detach().clone()
                z = self.state[y]["z"]
                y.lerp_(z, share)
                y.add_(y.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(y.grad, alpha=group["lr"])
        return loss


def made(rule: Rule, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """The optimizer `rule`, with two parameter groups where it can have them."""
    groups = optimizers.by_name(named, {"*.bias": {"weight_decay": 0.0, "adapt": False}})
    if rule == "lars":
        return optimizers.LARS(groups, lr=3.0, weight_decay=0.01, trust_coefficient=0.01)
    if rule == "larc":
        return optimizers.LARC(groups, lr=0.1, weight_decay=0.01)
    if rule == "lamb":
        return optimizers.LAMB(groups, lr=0.01, weight_decay=0.01)
    if rule == "muon":
        return optimizers.Muon(named, lr=0.02, weight_decay=0.01, rest=[named[0][0]], rest_lr=0.003)
    if rule == "lbfgs":
        return torch.optim.LBFGS(named, lr=0.1, max_iter=3, history_size=4)
    if rule == "sam":
        return SAM(groups, torch.optim.SGD, lr=0.1, momentum=0.9, rho=0.1)
    return ScheduleFree(named, lr=0.3)


class TunedTokens(Tokens):
    """Tokens under another rule."""

    by: Rule = "lars"

    def optimizer(self, named_parameters):
        return made(self.by, list(named_parameters))


class TunedImages(Images):
    """Images, with convolutions and batch normalisation, under another rule."""

    by: Rule = "lars"

    def optimizer(self, named_parameters):
        return made(self.by, list(named_parameters))
