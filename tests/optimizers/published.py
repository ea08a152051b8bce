"""Published implementations written down in float64, to compare ours with: they share no code with it."""

import torch
from torch import Tensor


def problem(steps: int = 5) -> tuple[list[Tensor], list[list[Tensor]]]:
    """First weights, one of them all zeros, and gradients by step."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(6, 4), (4, 9), (3, 2, 3, 3), (7,), (5, 5)]
    weights = [torch.randn(shape, generator=generator) for shape in shapes]
    weights[-1].zero_()
    return weights, [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(steps)]


def run(optimizer_of, steps: int = 5) -> list[Tensor]:
    """The weights after the problem's steps with an optimizer of ours or of torch's."""
    weights, gradients = problem(steps)
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    optimizer = optimizer_of(parameters)
    for each in gradients:
        for parameter, gradient in zip(parameters, each, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def apex_larc(lr: float, momentum: float, decay: float, trust: float, clip: bool) -> list[Tensor]:
    """apex.parallel.LARC over torch.optim.SGD, without its eps of 1e-8."""
    weights, gradients = problem()
    parameters = [torch.nn.Parameter(weight.double()) for weight in weights]
    sgd = torch.optim.SGD(parameters, lr=lr, momentum=momentum)
    for each in gradients:
        for parameter, given in zip(parameters, each, strict=True):
            gradient, weight = given.double(), parameter.detach()
            if weight.norm() and gradient.norm():
                rate = trust * weight.norm() / (gradient.norm() + weight.norm() * decay)
                gradient = (gradient + decay * weight) * (min(rate / lr, 1) if clip else rate)
            parameter.grad = gradient
        sgd.step()
    return [parameter.detach() for parameter in parameters]


def lamb(lr: float, betas: tuple[float, float], eps: float, decay: float) -> list[Tensor]:
    """Algorithm 2 of arXiv:1904.00962v5, as in mlx.optimizers.LAMB and timm's Lamb: bias correction, phi(z) = z."""
    weights, gradients = problem()
    found = []
    for number, first in enumerate(weights):
        w, m, v = first.double(), 0.0, 0.0
        for step, each in enumerate(gradients, 1):
            g = each[number].double()
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g * g
            r = (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps) + decay * w
            trust = w.norm() / r.norm() if w.norm() and r.norm() else 1.0
            w = w - lr * trust * r
        found.append(w)
    return found


def away(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest |a - b| / |a| of any tensor."""
    return max(
        float((x.double() - y.double()).norm() / x.double().norm().clamp_min(1e-9)) for x, y in zip(a, b, strict=True)
    )
