"""Rules of cut tensors against the same functions of whole ones: results, gradients, on three processes."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from grappe.domain.parts import cut, gathered
from grappe.launch.rank import ProcessRank
from grappe.launch.world import joined
from grappe.plan import Plan
from tests.processes import Pool

Run = Callable[[Tensor, Tensor], Tensor]
IMAGES: dict[str, Run] = {  # of [2, 4, 11, 6], whose height is cut, and a weight [4, 4, 3, 3]
    "sum": lambda x, w: x.sum((2, 3)) + x.sum(axis=2).sum(-1),
    "mean": lambda x, w: x.mean() * x.mean(2, keepdim=True),
    "std": lambda x, w: x.std(3) + x.var(1).sum((0, 2)).mean(),
    "softmax": lambda x, w: x.softmax(2) * F.log_softmax(x, dim=2) + x.softmax(1),
    "norm": lambda x, w: x.norm(2, -1) + F.normalize(x, dim=2).sum(-1) + x.amax(1).sum(-1)[:, None],
    "norm of nothing": lambda x, w: F.normalize(x * 0, dim=2).sum(-1) + x.norm(1, 2, keepdim=True)[..., 0],
    "sort": lambda x, w: x.sort(dim=-1)[0] + x.topk(3, 3).values.sum(-1, keepdim=True) + x.cumsum(1),
    "narrow": lambda x, w: x.narrow(2, 2, 7) * 2,
    "index": lambda x, w: x[:, 1, 2:9, None, ::2] + x[0, ..., 5, :][0, ::2] + x[:, :, -1].sum() + x[..., 1].mean(),
    "split": lambda x, w: torch.cat(x.split([4, 7], 2)[::-1], 2) + torch.cat(x.chunk(2, 1), dim=1),
    "begun by nothing": lambda x, w: torch.cat([torch.empty(0), x[:, :, :3], x], -2),
    "unbind": lambda x, w: torch.stack(x.unbind(2), 2) + torch.stack(x.unbind(1)[::-1], 1),
    "roll": lambda x, w: x.roll((3, 1), (2, 3)) + x.roll(-4, 2),
    "views": lambda x, w: x.transpose(1, 2).flatten(2).unflatten(2, (6, 4)).movedim(1, 3).unsqueeze(0).squeeze(),
    "merged": lambda x, w: x.permute(0, 2, 3, 1).reshape(-1, 4).view(2, 11, 6, 4).mT.expand(2, 2, -1, -1, -1)[0],
    "repeat": lambda x, w: x[:, :1].repeat(1, 2, 1, 1).expand_as(x[:, :2]).reshape(2, 2, 11, 3, 2),
    "zeros": lambda x, w: F.conv2d(F.pad(x, (1, 1, 2, 1)), w),
    "reflect": lambda x, w: F.pad(x, (2, 0, 3, 4), mode="reflect"),
    "circular": lambda x, w: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), w),
    "replicate": lambda x, w: F.pad(x, (0, 0, 2, 0), mode="replicate"),
    "convolution": lambda x, w: F.conv2d(x, w, None, stride=(2, 1), padding=1, dilation=(2, 1)),
    "groups": lambda x, w: F.conv2d(x, w[:, :2], padding="same", groups=2),
    "transposed": lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1),
    "apart": lambda x, w: F.conv_transpose2d(x, w, None, (3, 1), 0, 0, 1, (2, 1)),
    "ceiled": lambda x, w: F.max_pool2d(x, 3, 2, ceil_mode=True) + F.max_pool2d(x, 2, ceil_mode=True)[:, :, :5].mean(),
    "averaged": lambda x, w: F.avg_pool2d(x, 3, 1, 1) + F.adaptive_avg_pool2d(x, 1),
    "linear": lambda x, w: F.interpolate(x, scale_factor=(2, 1.5), mode="bilinear"),
    "corners": lambda x, w: F.interpolate(x, size=(17, 9), mode="bilinear", align_corners=True),
    "nearest": lambda x, w: F.interpolate(x, size=(29, 3)),
    "group norm": lambda x, w: F.group_norm(x, 2, w[0, :, 0, 0]) + F.instance_norm(x),
    "products": lambda x, w: (x.mT @ x) @ x.mT + w[0, 0].repeat(2, 4)[:, :11] @ x @ x.mT[..., :6, :],
    "of merged rows": lambda x, w: x.movedim(1, 3).reshape(-1, 4) @ w[0, 0].repeat(2, 2)[:4, :5],
    "merged rows summed": lambda x, w: w.view(4, 36)[:, :22].repeat(1, 6) @ x.movedim(1, 3).reshape(-1, 4),
    "addmm": lambda x, w: torch.addmm(w[0, 0, 0, :1], x.movedim(1, 3).reshape(-1, 4), w[..., 0, 0]).view(2, 11, 24),
    "scaled addmm": lambda x, w: (x[0, 0] * 2).addmm(x[0, 1], w.view(4, 36)[0, :36].view(6, 6), beta=0.5, alpha=3),
    "baddbmm": lambda x, w: torch.baddbmm(x[0].mT[..., :1], x[0].mT, x[0], beta=2),
    "square": lambda x, w: (x @ x.mT).softmax(-1) @ x,
    "losses": lambda x, w: F.mse_loss(x, x * 2) + F.smooth_l1_loss(x, x + 2, reduction="sum"),
}
HEADS: dict[str, Run] = {  # of [2, 2, 11, 6], whose positions are cut, and a bias [2, 11, 11]
    "attention": lambda x, b: F.scaled_dot_product_attention(x, x * 2, x + 1, is_causal=True),
    "learned bias": lambda x, b: F.scaled_dot_product_attention(x, x * 2, x + 1, attn_mask=b),
    "dropped": lambda x, b: F.scaled_dot_product_attention(x, x * 2, x, dropout_p=0.4, is_causal=True),
    "dropped with bias": lambda x, b: F.scaled_dot_product_attention(x, x * 2, x, attn_mask=b, dropout_p=0.4),
    "dropout": lambda x, b: F.dropout(x, 0.3) + F.dropout1d(x[0], 0.5),
}


def outcome(run: Run, inputs: Tensor, weight: Tensor, parts: bool = False) -> list[Tensor]:
    """Returns the result and the gradients."""
    leaf = (cut(inputs, 2) if parts else inputs.clone()).requires_grad_()
    weight = weight.clone().requires_grad_()
    torch.manual_seed(3)
    result = run(leaf, weight)
    result.backward(torch.linspace(-1, 1, result.numel()).view(result.shape))
    found = [result.detach(), *(torch.zeros_like(each) if each.grad is None else each.grad for each in (leaf, weight))]
    return [gathered(each, "the test") for each in found]


def gaps(process: ProcessRank, rendezvous_folder: Path) -> dict[str, float]:
    """The largest difference of each rule, relative to the largest number."""
    generator = torch.Generator().manual_seed(1)
    images, weight = (torch.randn(*shape, generator=generator) for shape in ((2, 4, 11, 6), (4, 4, 3, 3)))
    heads, bias = (torch.randn(*shape, generator=generator) for shape in ((2, 2, 11, 6), (2, 11, 11)))
    found = {}
    with joined(Plan.parse(f"domain={process.size},threads=1"), process, rendezvous_folder):
        for runs, inputs, other in ((IMAGES, images, weight), (HEADS, heads, bias)):
            for name, run in runs.items():
                try:
                    pairs = list(zip(outcome(run, inputs, other), outcome(run, inputs, other, True), strict=True))
                    assert all(a.shape == b.shape for a, b in pairs), [(a.shape, b.shape) for a, b in pairs]
                except Exception as error:
                    raise AssertionError(f"{name}: {error}") from error
                found[name] = max(float((a - b).abs().max() / a.abs().max().clamp(min=1)) for a, b in pairs)
    return found


def test_rules_give_results_and_gradients_of_the_whole(pool: Pool) -> None:
    for found in pool.run(f"{__name__}:gaps", 3):
        assert {name: gap for name, gap in found.items() if gap > 3e-6} == {}
