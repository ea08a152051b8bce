"""Calls as scripts write them that torch's databases lack: chains, indices, writes to parts, draws, copies."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def placements(operator: str) -> int:
    """Number of placements of a call that are drawn: random numbers are drawn in many calls of one form."""
    return 2 if operator.startswith("script: draw") else 12 if "statistics" in operator else 6


Case = tuple[str, Callable[..., Any], tuple[Tensor, ...]]


def _numbers(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_(grad)


def _labels(rows: int, classes: int) -> Tensor:
    return torch.randint(0, classes, (rows,))


# ---- Indices -----------------------------------------------------------------------------------------------
def _indices() -> Iterator[Case]:
    x, y, order = _numbers(6, 4), _labels(6, 4), torch.randperm(6)
    yield "permuted", lambda x, order: x[order], (x, order)
    yield "permuted columns", lambda x, order: x.index_select(1, order), (_numbers(3, 6), order)
    yield "permuted images", lambda x, order: 0.3 * x + 0.7 * x[order], (_numbers(6, 2, 3, 3), order)
    yield "some rows", lambda x, order: x[order[:4]], (x, order)
    yield "a label's column", lambda x, y: x[torch.arange(len(x)), y], (x, y)
    yield "a label's place", lambda x, y: x[torch.arange(len(x)), y, 1:], (_numbers(6, 4, 3), y)
    yield "gathered label", lambda x, y: x.gather(1, y.view(-1, 1)).squeeze(1), (x, y)
    yield "masked mean", lambda x, y: x[y == 2].sum() / (y == 2).sum().clamp(min=1), (x, y)
    yield "columns by list", lambda x: x[:, [2, 0, 2]], (x,)
    yield "each row", lambda x: [row.sum() for row in x], (x,)
    yield "some of a row", lambda x: (x[0], x[-1], x[1:3], x[::2], x[:, 1], x[..., -1], x[None], x[2, 3]), (x,)
    yield "diagonal", lambda x: (x.diagonal(), x.triu(1), x.trace()), (_numbers(5, 5),)
    yield "rows of a table, apart", lambda t, y: (t[y, :, y], t[:, y], t[:, y, y]), (_numbers(4, 4, 4), y)
    yield "diagonal before rows", lambda x: x.diagonal(0, 0, 1) * 2, (_numbers(3, 3, 6),)
    image, i = _numbers(4, 6, 5), torch.tensor([2, 0, 1])
    yield "apart", lambda x, i: (x[i, :, i], x[:, :, i], x[i, i], x[:, i, i], x[i]), (image, i)
    yield "a matrix of indices", lambda x, y: (x[y.view(2, 3)], x[:, y.view(3, 2) % 4]), (x, y)
    yield "one-hot", lambda y: F.one_hot(y, 4).double().mean(0), (y,)


# ---- Writes to parts ---------------------------------------------------------------------------------------
def _writes() -> Iterator[Case]:
    def writing(write: Callable[..., Any]) -> Callable[..., Any]:
        def function(x: Tensor, *others: Tensor) -> Any:
            made = x * 1
            total = made.sum()
            view = made.transpose(0, 1)
            write(made, *others)
            return made, view, made.sum(), total

        return function

    def put(name: str, write: Callable[..., Any], *others: Tensor) -> Case:
        return f"write {name}", writing(write), (_numbers(6, 4), *others)

    y, mask = _labels(6, 4), torch.rand(6, 4) > 0.5

    def fill(x: Tensor, at: Any, value: Any) -> None:
        x[at] = value

    def label(x: Tensor, y: Tensor, value: Any) -> None:
        x[torch.arange(len(x)), y] = value

    def more(x: Tensor, at: Any, value: Any) -> None:
        x[at] += value

    yield put("row", lambda x: fill(x, 0, 5.0))
    yield put("rows", lambda x: more(x, slice(1, 4), 1.0))
    yield put("every other", lambda x: fill(x, slice(None, None, 2), 0.0))
    yield put("column", lambda x: more(x, (slice(None), 1), 2.0))
    yield put("columns of rows", lambda x, v: fill(x, (slice(None), slice(1, 3)), v), _numbers(6, 2))
    yield put("masked", lambda x, m: fill(x, m, 0.0), mask)
    yield put("masked rows", lambda x, y: fill(x, y == 2, 1.5), y)
    yield put("masked more", lambda x, y: more(x, y > 1, 1.5), y)
    yield put("label", lambda x, y: label(x, y, 1.0), y)
    yield put("label from rows", label, y, _numbers(6))
    yield put("label from a number", label, y, _numbers(1))
    yield put("masked_fill_", lambda x, m: x.masked_fill_(m, -1.0), mask)
    yield put("through a view", lambda x: x.view(-1)[5:9].mul_(3))
    yield put("through a transposed view", lambda x: x.t()[1].add_(3))
    yield put("through two views", lambda x: x[:, 1:].reshape(6, 3)[2].zero_())
    yield put("diagonal", lambda x: x[:4].fill_diagonal_(7.0))
    yield put("scatter_", lambda x, y: x.scatter_(1, y.view(-1, 1), 9.0), y)
    yield put("index_fill_", lambda x: x.index_fill_(0, torch.tensor([1, 3]), 2.0))
    yield put("copy_", lambda x, v: x.copy_(v), _numbers(6, 4))
    yield put("copy_ to a row", lambda x, v: x[2].copy_(v), _numbers(4))
    yield put("clamp_ and more", lambda x: x.clamp_(-0.5, 0.5).mul_(2).sub_(1).div_(3))
    yield "index_put", lambda x, y, v: torch.index_put(x, (torch.arange(6), y), v), (_numbers(6, 4), y, _numbers(6))
    yield (
        "index_put of a mask",
        lambda x, m: torch.index_put(x, (m,), torch.tensor(2.0).double()),
        (_numbers(6, 4), mask),
    )
    aten, each = torch.ops.aten, torch.arange(6)
    yield (
        "index_put, unsafe",
        lambda x, y, v: aten._unsafe_index_put(x, (each, y), v),
        (_numbers(6, 4, grad=False), y, _numbers(6, grad=False)),
    )
    yield (
        "index_put, inner",
        lambda x, y, v: aten._index_put_impl_(x + 1, (each, y), v),
        (_numbers(6, 4, grad=False), y, _numbers(6, grad=False)),
    )
    yield (
        "index_put more",
        lambda x, y, v: torch.index_put(x, (torch.arange(6), y), v, accumulate=True),
        (_numbers(6, 4), y, _numbers(6)),
    )


# ---- Chains ------------------------------------------------------------------------------------------------
def _chains() -> Iterator[Case]:
    x, w, b, y = _numbers(6, 4), _numbers(4, 3), _numbers(3), _labels(6, 3)

    def chain(name: str, function: Callable[..., Any], *tensors: Tensor) -> Case:
        return f"chain {name}", function, tensors

    yield chain("sums", lambda x: (x.sum(0) / 3 - x.sum(0) * 2 + 1, -x.sum(), 2 - x.sum(), 1 / x.sum()), x)
    yield chain("sum and rows", lambda x: (x - x.mean(0)) / (x.std(0) + 1e-5), x)
    yield chain("sum times rows", lambda x: x.sum(0) * x + x.sum(), x)
    yield chain("product of sums", lambda x: x.sum(0) * x.mean(0) + x.sum(0).exp(), x)
    yield chain("sum, view", lambda x: x.sum(0).view(2, 2).t().reshape(-1)[1:], x)
    yield chain("sum written", lambda x: x.sum(0).mul_(2).add_(x.mean(0)).add_(1), x)
    yield chain("sum read twice", lambda x: (float(x.detach().sum()), x.sum() * 2, x.sum().item()), x.detach())
    yield chain("sum clamped", lambda x: (x.sum(0).clamp(min=0), x.sum(0).abs(), x.sum(0) > 0, x.sum(0).max()), x)
    yield chain("sum of sums", lambda x: sum([each.sum() for each in x.split(2, 1)]), x)
    yield chain("mean of a product", lambda x, w: (x @ w).pow(2).mean(), x, w)
    yield chain("linear, relu", lambda x, w, b: F.relu(F.linear(x, w.t(), b)).sum(1), x, w, b)
    yield chain("addmm", lambda x, w, b: torch.addmm(b, x, w, beta=0.5, alpha=2), x, w, b)
    yield chain("addmm of rows", lambda x, w, v: torch.addmm(v, x, w), x, w, _numbers(6, 3))
    yield chain("addmm of a sum", lambda x, v: torch.addmm(v, x.t(), x), x, _numbers(4, 4))
    yield chain("gram", lambda x: F.normalize(x) @ F.normalize(x).t(), x)
    yield chain("contrastive", lambda x: F.cross_entropy(x @ x.t() / 0.5, torch.arange(6)), x)
    yield chain("distances", lambda x: torch.cdist(x, x).topk(2, largest=False).values, x)
    yield chain("distances to centers", lambda x, c: torch.cdist(x, c).argmin(1), x, _numbers(3, 4))
    yield chain(
        "losses",
        lambda x, y: (F.cross_entropy(x, y), F.cross_entropy(x, y, reduction="none").mean()),
        _numbers(6, 3),
        y,
    )
    yield chain("ignored labels", lambda x, y: F.cross_entropy(x, y, ignore_index=1), _numbers(6, 3), y)
    yield chain(
        "weighted", lambda x, y, w: F.cross_entropy(x, y, w, label_smoothing=0.1), _numbers(6, 3), y, b.detach().abs()
    )
    yield chain("accuracy", lambda x, y: (x.argmax(1) == y).float().mean().item(), _numbers(6, 3), y)
    yield chain("accuracy, sum", lambda x, y: (x.argmax(1) == y).sum().item() / len(y), _numbers(6, 3), y)
    yield chain("concatenated", lambda x: torch.cat([x, 2 * x]).chunk(2)[1] + torch.cat([x, x])[:6], x)
    yield chain("concatenated, split", lambda x: torch.cat([x, x, x]).split([6, 12])[1].sum(1), x)
    yield chain("concatenated, parts", lambda x: torch.cat([x, x])[-6:] - torch.cat([x, x])[2:8], x)
    yield chain("stacked views", lambda x: torch.stack([x, x + 1]).flatten(0, 1).view(2, 6, 4)[1], x)
    yield chain("stacked last", lambda x: torch.stack([x, x + 1], -1).reshape(6, 8), x)
    yield chain("flattened", lambda x: F.relu(x.flatten(1)).view(6, -1), _numbers(6, 2, 3))
    yield chain(
        "merged rows", lambda x: F.softmax(x.reshape(-1, 5), -1).view(6, 3, 5).transpose(0, 1), _numbers(6, 3, 5)
    )
    yield chain("merged time and rows", lambda x: x.transpose(0, 1).reshape(-1, 5).sum(1).view(3, 6), _numbers(6, 3, 5))
    yield chain(
        "types",
        lambda x: (x.float().double().mean(), x.half().sum(), x.to(torch.bfloat16).mean(), x > 0, (x > 0).sum()),
        x,
    )
    yield chain("bits", lambda x: x.view(torch.int64).view(torch.float64) * 2, x.detach())
    yield chain("expanded", lambda x: x.mean(0, keepdim=True).expand_as(x).contiguous() + x[:, :1].expand(-1, 4), x)
    yield chain("repeated", lambda x: (x.repeat(2, 3), x.repeat_interleave(2, 0), x.tile(2)), x)
    yield chain("weights of rows", lambda x: torch.where(x > 0, x, torch.zeros_like(x)) * torch.ones_like(x[:, :1]), x)
    yield chain(
        "like", lambda x: (x.new_zeros(6, 2) + 1, x.new_full((3,), 2.0), torch.full_like(x, 3), x.new_ones(x.shape)), x
    )
    yield chain("means of classes", lambda x, y: torch.zeros(3, 4, dtype=x.dtype).index_add(0, y, x), x, y)
    yield chain(
        "scatter of a sum",
        lambda x, y: torch.zeros(6, 3, dtype=x.dtype).scatter(1, y.view(-1, 1), 1.0) * x[:, :3],
        x,
        y,
    )
    yield chain("embedding", lambda w, i: F.embedding(i, w).mean(1), _numbers(7, 3), torch.randint(0, 7, (6, 4)))
    yield chain(
        "embedding of no rows",
        lambda w, i, x: F.embedding(i, w) * x,
        _numbers(7, 3),
        torch.randint(0, 7, (2,)),
        _numbers(6, 2, 3),
    )
    yield chain(
        "convolution",
        lambda x, w, b: F.max_pool2d(F.relu(F.conv2d(x, w, b, padding=1)), 2),
        _numbers(5, 2, 4, 4),
        _numbers(3, 2, 3, 3),
        b,
    )
    yield chain("checkpoint", lambda x, w: checkpoint(lambda a: (a @ w).tanh(), x, use_reentrant=False), x, w)
    yield chain("inference", lambda x, w: _inference(lambda: (F.relu(x @ w) + 1).softmax(1).sum(0)), x, w)
    yield chain("last of two", lambda x: torch.cat([x, 2 * x])[-len(x) :] + x, x)
    yield chain("text of a result", lambda x: torch.tensor([*repr((x * 2).sum(1)).encode()]), x)
    yield chain(
        "strides of a convolution",
        lambda x, w: torch.tensor(F.conv2d(x, w).stride()),
        _numbers(6, 2, 4, 4, grad=False).to(memory_format=torch.channels_last),
        _numbers(3, 2, 3, 3, grad=False),
    )
    yield chain("inference, written", lambda x: _inference(lambda: _written(x)), x)
    yield chain("corrected by more than rows", lambda x: (x.var(0, correction=6), x.std(0, correction=9)), x)
    yield chain(
        "inference, pools",
        lambda x: _inference(lambda: (F.adaptive_avg_pool1d(x, 2), F.avg_pool1d(x, 2), x.argsort())),
        _numbers(6, 2, 4),
    )
    yield chain(
        "imaginary",
        lambda x: (x.conj().imag + 1, x.conj().real, (x * x.conj()).abs()),
        _numbers(6, 2, dtype=torch.complex128),
    )
    yield chain("padded", lambda x: F.pad(x, (1, 2)) + F.pad(x, (0, 0, 1, 1), value=2.0)[1:-1].sum(), x)
    yield chain(
        "renormalized", lambda x: (x.norm(), x.norm(dim=1), torch.linalg.vector_norm(x, 3), x.renorm(2, 0, 1.0)), x
    )
    yield chain(
        "extremes",
        lambda x: (x.max(), x.min(), x.max(0).values, x.max(1).indices, x.argmax(), x.amin(0), x.aminmax()),
        x,
    )
    yield chain("all", lambda x: ((x > -9).all(), (x > 2).any(), (x > 0).all(1), torch.isfinite(x).all().item()), x)
    yield chain(
        "in order",
        lambda x: (x.sort(0).values, x.sort(1).indices, x.cumsum(0), x.cumsum(1), x.flip(0), x.roll(1, 0), x.median()),
        x,
    )
    yield chain("counts", lambda y: (torch.bincount(y, minlength=3), y.unique(), (y == 1).nonzero()), y)
    for name in ("mean", "sum"):
        yield chain(
            f"bce {name}",
            lambda x, n=name: F.binary_cross_entropy_with_logits(x, (x.detach() > 0).double(), reduction=n),
            x,
        )
        yield chain(
            f"kl {name}", lambda x, n=name: F.kl_div(F.log_softmax(x, 1), F.softmax(-x.detach(), 1), reduction=n), x
        )
    yield chain("vae", lambda m, v: -0.5 * torch.sum(1 + v - m.pow(2) - v.exp()), x, _numbers(6, 4))
    yield chain(
        "dice",
        lambda x: 1 - (2 * (x.sigmoid() * (x > 0)).sum((1, 2)) + 1) / (x.sigmoid().sum((1, 2)) + 1),
        _numbers(6, 3, 4),
    )


def _written(value: Tensor) -> Tensor:
    made = value.clone()
    made.erfinv_().nan_to_num_(0.5).add_(1)
    return made


def _inference(function: Callable[[], Any]) -> Any:
    with torch.inference_mode():
        return function()


# ---- Normalisation, attention, layers ----------------------------------------------------------------------
def _layers() -> Iterator[Case]:
    for dtype in (torch.float64, torch.float32):
        name = str(dtype).removeprefix("torch.")
        images, w = _numbers(6, 3, 4, 4, dtype=dtype), _numbers(3, dtype=dtype)
        yield (
            f"batch_norm {name}",
            lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
            (images, w, _numbers(3, dtype=dtype)),
        )
        yield (
            f"batch_norm statistics {name}",
            lambda x, m, v: (F.batch_norm(x, m, v, training=True, momentum=0.3), m, v),
            (images, _numbers(3, dtype=dtype, grad=False), torch.rand(3, dtype=dtype)),
        )
        yield (
            f"batch_norm of rows {name}",
            lambda x: F.batch_norm(F.batch_norm(x, None, None, None, None, True).relu(), None, None, None, None, True),
            (_numbers(6, 3, dtype=dtype),),
        )
        yield (
            f"layer_norm {name}",
            lambda x, w: F.layer_norm(x, (4,), w),
            (_numbers(6, 3, 4, dtype=dtype), _numbers(4, dtype=dtype)),
        )
        yield f"group_norm {name}", lambda x, w: F.group_norm(x, 3, w), (images, w)
    q, k, v = (_numbers(4, 2, 5, 8) for _ in range(3))
    attention = F.scaled_dot_product_attention
    yield "attention", lambda q, k, v: attention(q, k, v, is_causal=True), (q, k, v)
    yield "attention, mask", lambda q, k, v, m: attention(q, k, v, attn_mask=m), (q, k, v, torch.rand(5, 5) > 0.2)
    yield (
        "attention, masks of rows",
        lambda q, k, v, m: attention(q, k, v, attn_mask=m),
        (q, k, v, torch.rand(4, 1, 5, 5) > 0.2),
    )
    yield (
        "attention, bias",
        lambda q, k, v, m: attention(q, k, v, attn_mask=m),
        (q, k, v, _numbers(4, 2, 5, 5, grad=False)),
    )
    yield (
        "attention, bias of heads",
        lambda q, k, v, m: attention(q, k, v, attn_mask=m),
        (q, k, v, _numbers(1, 2, 5, 5, grad=False)),
    )
    yield "attention, dropout", lambda q, k, v: attention(q, k, v, dropout_p=0.5), (q, k, v)
    yield "LSTM", _made(lambda: nn.LSTM(3, 4, 2, dropout=0.3, batch_first=True)), (_numbers(6, 5, 3),)
    yield (
        "LSTM, both ways",
        _made(lambda: nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True)),
        (_numbers(6, 5, 3),),
    )
    yield "GRU", _made(lambda: nn.GRU(3, 4, bidirectional=True)), (_numbers(5, 6, 3), _numbers(2, 6, 4))
    yield "transformer", _made(lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)), (_numbers(4, 5, 8),)


def _sizes() -> Iterator[Case]:
    """Images made larger and smaller, whose gradients are operators of their own."""
    for mode, shape in (
        ("nearest", (6, 2, 4)), ("nearest", (6, 2, 4, 4)), ("nearest", (4, 2, 3, 3, 3)), ("nearest-exact", (6, 2, 4)),
        ("nearest-exact", (6, 2, 4, 4)), ("nearest-exact", (4, 2, 3, 3, 3)), ("linear", (6, 2, 4)),
        ("bilinear", (6, 2, 4, 4)), ("bicubic", (6, 2, 4, 4)), ("trilinear", (4, 2, 3, 3, 3)), ("area", (6, 2, 4, 4)),
    ):  # fmt: skip
        yield (
            f"interpolate {mode} {len(shape)}",
            lambda x, m=mode: F.interpolate(x, scale_factor=2, mode=m),
            (_numbers(*shape),),
        )
    for mode in ("bilinear", "bicubic"):
        yield (
            f"interpolate {mode} smoothly",
            lambda x, m=mode: F.interpolate(x, (3, 3), mode=m, antialias=True),
            (_numbers(6, 2, 4, 4),),
        )
    yield "fold", lambda x: F.fold(F.unfold(x, 2), (4, 4), 2), (_numbers(6, 2, 4, 4),)
    pools = (F.avg_pool1d, F.max_pool1d, F.lp_pool1d)
    for pool in pools:
        yield pool.__name__, lambda x, p=pool: p(x, 2) if p is not F.lp_pool1d else p(x, 2, 2), (_numbers(6, 2, 8),)
    yield "adaptive pools", lambda x: (F.adaptive_avg_pool1d(x, 3), F.adaptive_max_pool1d(x, 3)), (_numbers(6, 2, 8),)
    yield (
        "unsafe_split_with_sizes",
        lambda x: torch.unsafe_split_with_sizes(torch.cat([x, x]), [6, 6])[1] * 2,
        (_numbers(6, 2),),
    )
    yield "same size", lambda x: (torch.is_same_size(x, x + 1), x.is_pinned()), (_numbers(6, 2, grad=False),)


def _made(make: Callable[[], nn.Module]) -> Callable[..., Any]:
    """A call of a module that is made anew, with the same parameters."""

    def function(*tensors: Tensor) -> Any:
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(1)
        module = make().double()
        torch.set_rng_state(state)
        return module(*tensors)

    return function


# ---- Random numbers ----------------------------------------------------------------------------------------
def _draws() -> Iterator[Case]:
    shapes = ((3, 4), (5, 3), (40, 3), (7, 9), (16, 1), (3, 30), (2, 20))
    fills: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
        ("bernoulli_", lambda x: x.bernoulli_(0.3)),
        ("uniform_", lambda x: x.uniform_(-1, 2)),
        ("normal_", lambda x: x.normal_(1, 2)),
        ("exponential_", lambda x: x.exponential_(2)),
        ("geometric_", lambda x: x.geometric_(0.4)),
        ("log_normal_", lambda x: x.log_normal_()),
        ("cauchy_", lambda x: x.cauchy_()),
        ("random_", lambda x: x.random_(10)),
        ("dropout", lambda x: F.dropout(x, 0.4)),
        ("native_dropout", lambda x: torch.native_dropout(x, 0.4, True)[0]),
        ("rand_like", torch.rand_like),
        ("randn_like", lambda x: torch.randn_like(x) * 2),
        ("randint_like", lambda x: torch.randint_like(x, 3, 9)),
        ("bernoulli", lambda x: torch.bernoulli(x, 0.5)),
        ("bernoulli of rows", lambda x: torch.bernoulli(x.sigmoid())),
        ("multinomial", lambda x: torch.multinomial(x.exp(), 1)),
        ("rrelu", lambda x: F.rrelu(x, training=True)),
        ("to a part", lambda x: x[1:].uniform_()),
        ("to a column", lambda x: x[:, 0].normal_()),
    )
    for name, fill in fills:
        for shape in shapes:
            for dtype in (torch.float64, torch.float32)[: 1 + (shape in shapes[2:4])]:
                yield (
                    f"draw {name} {shape} {dtype}",
                    lambda x, fill=fill: (fill(x + 1), torch.rand(2), fill(x * 2)),
                    (_numbers(*shape, grad=False, dtype=dtype),),
                )
    yield "dropout and its gradient", lambda x: F.dropout(x, 0.4), (_numbers(20, 3),)
    yield "native_dropout and its gradient", lambda x: torch.native_dropout(x, 0.4, True), (_numbers(20, 3),)
    yield "native_dropout of all", lambda x: torch.native_dropout(x, 1.0, True), (_numbers(20, 3),)
    yield "native_dropout of none", lambda x: torch.native_dropout(x, 0.4, False), (_numbers(20, 3),)
    yield "dropout of channels", lambda x: F.dropout2d(x, 0.4), (_numbers(6, 4, 2, 2),)


# ---- What leaves torch -------------------------------------------------------------------------------------
def _leaving() -> Iterator[Case]:
    def pickled(x: Tensor) -> Tensor:
        return pickle.loads(pickle.dumps(x))

    def saved(x: Tensor) -> Tensor:
        file = io.BytesIO()
        torch.save(x, file)
        file.seek(0)
        return torch.load(file)

    x, y = _numbers(6, 4, grad=False), _labels(6, 4)
    yield "tolist", lambda x: x.tolist(), (x,)
    yield "numpy", lambda x: torch.tensor(x.numpy().copy()), (x,)
    yield "numpy written", _by_numpy, (x,)
    yield "texts", lambda x: (str(x), repr(x.sum()), f"{x.mean():.4f}", str(x.sum(0)), str(x[2])), (x,)
    yield "numbers", lambda x: (float(x.sum()), int(x[0, 0]), bool(x.sum() > 0), len(x), x.mean().item()), (x,)
    yield "of Python", lambda x, y: (max(y.tolist()), [int(each) for each in y], 3 in y, len(x), x.shape), (x, y)
    yield "pickled", pickled, (x,)
    yield "saved", saved, (x,)
    yield "deepcopied", copy.deepcopy, (x,)
    yield "equal", lambda x: (torch.equal(x, x + 0), torch.equal(x, x + 1), torch.allclose(x, x)), (x,)


def _mistakes() -> Iterator[Case]:
    """Calls that raise an error, which a script may catch: the same on all processes."""
    x, w, y = _numbers(6, 4), _numbers(3, 3), _labels(6, 4)
    for name, wrong in (
        ("sizes", lambda x, w, y: x + w),
        ("product", lambda x, w, y: x @ w),
        ("dimension", lambda x, w, y: x.softmax(4)),
        ("sum's dimension", lambda x, w, y: x.sum(3)),
        ("view", lambda x, w, y: x.view(5, 5)),
        ("together", lambda x, w, y: torch.cat([x, w])),
        ("index", lambda x, w, y: x[9]),
        ("labels", lambda x, w, y: F.cross_entropy(x, y + 9)),
        ("types", lambda x, w, y: x.long() @ w),
        ("in place", lambda x, w, y: x.detach().clone().add_(w)),
        ("a number", lambda x, w, y: x.sum(0).item()),
        ("truth", lambda x, w, y: bool(x > 0)),
    ):
        yield f"mistake {name}", lambda x, w, y, wrong=wrong: _error(lambda: wrong(x, w, y)), (x, w, y)


def _error(function: Callable[[], Any]) -> str:
    try:
        return str(function())
    except Exception as error:
        return type(error).__name__


def _by_numpy(x: Tensor) -> Tensor:
    made = x * 1
    array = made.numpy()
    array *= 2
    return made + 0


def cases() -> Iterator[Case]:
    """Yields names, functions and their tensors, the same each time."""
    torch.default_generator.manual_seed(0)
    for each in (_indices, _writes, _chains, _layers, _sizes, _draws, _leaving, _mistakes):
        yield from each()
