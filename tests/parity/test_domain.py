"""domain= against one plain process: convolutions, U-Nets, transformers, alone and with data parallelism."""

import functools
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import grappe
from grappe import Arrays, Task
from grappe.errors import TaskError
from grappe.parallel.shard import check_gradients
from grappe.plan import Plan
from grappe.verbs.verify.verify import verify
from tests.parity import reference
from tests.parity.cell import TOLERANCE, difference
from tests.parity.cover import in_turn
from tests.parity.planted import runner
from tests.parity.test_native import assert_learned_alike
from tests.processes import Pool

STEPS = 4


class Cut(Task):
    """A task of 14 samples in batches of 6: the last batch of an epoch is short."""

    epochs: int = 2
    batch_size: int = 6
    clip: float | None = 0.5

    def model(self) -> nn.Module:
        return MODELS[type(self).__name__]()

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.1, momentum=0.9)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def data(self, split: str, folder: Path) -> Arrays:
        generator = torch.Generator().manual_seed(5)
        shape = SHAPES[type(self).__name__]
        images = torch.randn(14, *shape, generator=generator)
        targets = (14, *shape[1:]) if "UNet" in type(self).__name__ else (14,)
        return Arrays(images, torch.randint(0, 3, targets, generator=generator))


class UNet2D(Cut):
    """Pixels of classes, some ignored; two cuts that meet again, height 12: 3 processes have 4 rows."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, reduction="none", ignore_index=0)

    def counts(self, target: torch.Tensor) -> torch.Tensor:
        return (target != 0).float()


class UNet3D(Cut):
    """Volumes, of which the depth is cut; the loss is a mean over it."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, reduction="none").mean((1, 2, 3))


class ResNet(Cut):
    """Batch normalisation over whole images, dropout, and a pooled head; a height of 11 that does not divide."""

    clip: float | None = None

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model)


class Flat(ResNet):
    """A head that takes flattened features: nothing is gathered for it."""


class ViT(Cut):
    """Patches, a class token and learned positions: of 17 tokens no process has as many as another."""

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.blocks)


class GPT(Cut):
    """Causal attention over 9 tokens with tied embeddings; some targets are ignored, a process may have none."""

    def data(self, split: str, folder: Path) -> Arrays:
        generator = torch.Generator().manual_seed(6)
        tokens = torch.randint(0, 11, (14, 9), generator=generator)
        keep = torch.randint(1, 9, (14, 1), generator=generator)
        return Arrays(tokens, torch.where(torch.arange(9) < keep, tokens.roll(-1, 1), -1))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.view(-1, 11), target.view(-1), reduction="none", ignore_index=-1).view(
            target.shape
        )

    def counts(self, target: torch.Tensor) -> torch.Tensor:
        return (target >= 0).float()

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.blocks)


class Encoder(GPT):
    """Attention that does not see padding, written out with a softmax as well."""

    def domain(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[int, int]:
        return 1, 1


class Attention(nn.Module):
    def __init__(self, width: int, causal: bool, written_out: bool = False) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        self.qkv, self.causal, self.written_out = nn.Linear(width, 3 * width), causal, written_out

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, 2, width // 2).transpose(1, 2) for t in self.qkv(self.norm(x)).split(width, 2))
        if self.written_out:
            scores = (q @ k.transpose(-2, -1)) / (width // 2) ** 0.5
            y = scores.masked_fill(torch.ones(length, length).tril() == 0, float("-inf")).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=self.causal)
        return x + self.out(y.transpose(1, 2).contiguous().view(batch, length, width))


class Words(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(11, 16), nn.Embedding(9, 16)
        self.blocks = nn.ModuleList([Attention(16, causal), Attention(16, causal, written_out=causal)])
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) if not causal else None
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight, self.causal = self.embed.weight, causal

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        seen = None if self.causal else (tokens != 0)[:, None, None, :]
        for block in self.blocks:
            x = block(x, seen)
        if self.layer is not None:
            x = self.layer(x, src_key_padding_mask=tokens == 0)
        return self.head(x)


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.place = nn.Conv2d(3, 8, 3, 3), nn.Parameter(torch.randn(1, 17, 8) * 0.1)
        self.first = nn.Parameter(torch.randn(1, 1, 8) * 0.1)
        self.blocks, self.head = nn.ModuleList([Attention(8, False)]), nn.Linear(8, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0] + x[:, 1:].mean(1))


class Twice(nn.Module):
    """A U-Net of one level."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        of = functools.partial(getattr, nn)
        conv, up = of(f"Conv{dims}d"), of(f"ConvTranspose{dims}d")
        self.fine, self.coarse = conv(1, 4, 3, padding=1), conv(4, 6, 3, padding=1)
        self.norm, self.up, self.out = nn.GroupNorm(2, 4), up(6, 4, 2, 2), conv(8, 3, 3, padding=1)
        self.pool, self.mode = of(f"MaxPool{dims}d")(2), "bilinear" if dims == 2 else "trilinear"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = F.relu(self.norm(self.fine(x)))
        coarse = F.relu(self.coarse(self.pool(fine)))
        again = F.interpolate(
            F.avg_pool2d(fine, 2) if fine.dim() == 4 else self.pool(fine), scale_factor=2, mode=self.mode
        )
        return self.out(torch.cat([fine + again, self.up(coarse)], 1))


def _residual(*head: nn.Module) -> nn.Module:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(x + self.b(self.a(x)), inplace=True)

    stem = nn.Sequential(nn.Conv2d(3, 6, 5, 2, 2, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
    return nn.Sequential(stem, nn.MaxPool2d(3, 1, 1), Residual(), nn.Dropout(0.2), *head)


MODELS = {
    "UNet2D": lambda: Twice(2),
    "UNet3D": lambda: Twice(3),
    "ResNet": lambda: _residual(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)),
    "Flat": lambda: _residual(nn.Flatten(), nn.Linear(6 * 36, 3)),
    "ViT": Patches,
    "GPT": lambda: Words(True),
    "Encoder": lambda: Words(False),
}
SHAPES = {
    "UNet2D": (1, 12, 8), "UNet3D": (1, 8, 4, 6), "ResNet": (3, 11, 12), "Flat": (3, 11, 12), "ViT": (3, 12, 12),
}  # fmt: skip
TASKS = [UNet2D(), UNet3D(), ResNet(), Flat(), ViT(), GPT(), Encoder()]


@functools.cache
def expected(name: str, ways: int = 1) -> dict:
    return reference.train(next(task for task in TASKS if type(task).__name__ == name), STEPS, ways=ways)


PLANS = [
    *(f"domain={parts}{more}" for parts in (2, 3, 4) for more in ("", ",recompute", ",precision=bf16")),
    *(f"domain=2,{more}" for more in ("replicate=2", "shard=2", "shard=2,recompute")),
    "domain=2,shard=2,zero=1,microbatches=2", "domain=3,replicate=2", "domain=4,shard=2",
]  # fmt: skip


def assert_rounded_alike(pool: Pool, task: Task, plan: Plan, found: dict) -> None:
    """Sums of parts are rounded: no more than what one process learns is, or than by sums over slices of the batch."""
    [alone] = pool.run("tests.parity.cell:train", 1, task, f"precision={plan.precision}", STEPS)
    gaps = [difference(expected(type(task).__name__)["weights"], alone["weights"])[0]]
    assert gaps[0] > TOLERANCE, "it did not round at all"
    if not isinstance(task, ResNet):
        text = f"replicate={plan.domain},precision={plan.precision}"
        slices = pool.run("tests.parity.cell:train", plan.domain, task, text, STEPS)
        gaps.append(difference(alone["weights"], slices[0]["weights"])[0])
    assert difference(alone["weights"], found["weights"])[0] <= 2 * max(gaps)


@pytest.mark.parametrize("task", [UNet2D(), ViT()], ids=lambda task: type(task).__name__)
def test_fp16_scales_the_loss_of_parts(pool: Pool, task: Task) -> None:
    found = pool.run("tests.parity.cell:train", 2, task, "domain=2,precision=fp16", STEPS)
    assert not any(found[0]["skipped"])
    assert_rounded_alike(pool, task, Plan.parse("domain=2,precision=fp16"), found[0])


@pytest.mark.parametrize(
    ("task", "plan"), in_turn(TASKS, PLANS), ids=lambda value: value if isinstance(value, str) else type(value).__name__
)
def test_parts_of_samples_learn_what_whole_ones_do(pool: Pool, task: Task, plan: str) -> None:
    parsed = Plan.parse(plan)
    if isinstance(task, ResNet) and parsed.microbatches > 1:
        parsed = Plan.parse("domain=2,shard=2,zero=1")  # batch normalisation would see other batches
    ways = parsed.data_parallel if isinstance(task, ResNet) else 1  # batch normalisation is of each data slice
    found = pool.run("tests.parity.cell:train", parsed.processes, task, str(parsed), STEPS)
    for one in found:
        assert one["scores"] == found[0]["scores"]
    if parsed.precision == "bf16":
        assert_rounded_alike(pool, task, parsed, found[0])
        return
    wanted = expected(type(task).__name__, ways)
    assert_learned_alike(found, wanted, plan)
    for one in found:
        if ways == 1:
            assert one["scores"].loss == pytest.approx(wanted["validation"], rel=1e-5)
        assert one["norms"] == pytest.approx(wanted["norms"], rel=1e-5) or task.clip is None


@pytest.mark.parametrize(
    ("task", "fault", "cause"),
    [
        (UNet2D(), "no_halos", "^not found"),
        (UNet2D(), "halos_of_the_other_side", "^not found"),
        (ResNet(), "norms_of_parts", "BatchNorm|batch normalisation"),
        (UNet2D(), "norms_of_parts", "^not found"),
        (UNet2D(), "halos_without_gradient", "^not found"),
        (GPT(clip=None), "gradient_times_the_degree", "^not found"),
        (GPT(), "mask_that_is_shifted", "^not found"),
        (ViT(), "", ""),
    ],
)
def test_verify_finds_that_parts_differ(pool: Pool, task: Task, fault: str, cause: str) -> None:
    [found] = verify(task, ["domain=2,threads=1"], run=runner(pool, fault), steps=3)
    assert found.verdict == ("different" if fault else "same"), found
    assert not fault or any(re.search(cause, each) for each in found.causes), found.causes


def test_a_run_is_evaluated_and_predicted_in_parts_or_whole(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    run = grappe.train(UNet2D(epochs=1, batch_size=4), "domain=2,threads=1", tmp_path / "run")
    whole, parts = (grappe.evaluate(run, "train", plan, task=UNet2D) for plan in ("", "domain=2,threads=1"))
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    images = torch.randn(3, 1, 13, 8, generator=torch.Generator().manual_seed(7))[:, :, :12]
    alone = torch.stack(list(grappe.predict(run, images, task=UNet2D)))
    together = torch.stack(list(grappe.predict(run, images, "domain=2,threads=1", task=UNet2D)))
    assert (alone - together).abs().max() < 1e-5
    assert "domain= sends in a step, from process 0: halos" in capfd.readouterr().out


def test_gradients_that_were_not_summed_are_found() -> None:
    with pytest.raises(TaskError, match="no gradient"):
        check_gradients([(0, {"a": 1.0}), (0, {"a": None})])
    with pytest.raises(TaskError, match="other gradients of b"):
        check_gradients([(0, {"a": 1.0, "b": 2.0}), (1, {"a": 3.0}), (0, {"a": 1.0, "b": 2.5})])
    check_gradients([(0, {"a": 1.0}), (1, {"a": 3.0}), (0, {"a": 1.0})])
