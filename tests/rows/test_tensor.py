"""Tests of rows in real processes: views and writes, memory that is shared, what is refused, processes that stray."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from grappe.errors import GrappeError
from grappe.launch.rank import ProcessRank
from grappe.rows.context import RowsContext
from grappe.rows.messages import ProcessAstray
from grappe.rows.plans import activate
from grappe.rows.tensor import Placement, Rows, from_local, full, local_rows, split
from tests.processes import Pool

SIZES = ((3, 0, 2), (1, 0, 0), (2, 2, 2))
"""Rows of three processes."""


@contextlib.contextmanager
def sharing(process: ProcessRank, folder: Path) -> Iterator[RowsContext]:
    """Context of processes with rows."""
    store = f"file://{folder}/{process.job}"
    dist.init_process_group("gloo", init_method=store, rank=process.rank, world_size=process.size)
    torch.set_default_dtype(torch.float64)
    try:
        with activate(
            RowsContext(rank=process.rank, size=process.size, script_folder=str(Path(__file__).parent))
        ) as made:
            yield made
    finally:
        torch.set_default_dtype(torch.float32)
        dist.destroy_process_group()


# ---- The same as plain tensors -----------------------------------------------------------------------------


def written_by_index(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z[0] = 0
    z[:, 1] = 2
    z[y == 2] *= 3
    z[x > 1] = 0.5
    z[torch.arange(len(z)), y] = 7.0
    z.view(len(z), -1)[:, 5] = 1
    row, z = z[-1], z.mul_(3)
    return z + row


def sums_and_their_views(x: Tensor, y: Tensor) -> Tensor:
    total = x.sum(0)
    part = total[1:]
    before = part.tanh()
    total.mul_(2)
    return before.sum() + part.sum() + total.t().sum()


def views_in_place(x: Tensor, y: Tensor) -> Tensor:
    z = y.clone().to(x.dtype)
    z.unsqueeze_(1)
    z.transpose_(0, 1).t_()
    assert z.shape == (len(x), 1)
    return z * x[:, 0]


def own_function(x: Tensor, y: Tensor) -> Tensor:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            ctx.save_for_backward(value)
            return value**3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 3 * ctx.saved_tensors[0] ** 2 * grad

    value = Cube.apply(x)
    if value.requires_grad:
        value.register_hook(lambda grad: grad.clamp(-1, 1))
    return value


def per_sample(x: Tensor, y: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda row: (row**3).sum()))(x)


def without_autograd(x: Tensor, y: Tensor) -> Tensor:
    with torch.inference_mode():
        return F.dropout(F.linear(x.detach(), torch.ones(6, 6)).relu(), 0.3) + x.detach().view(-1, 4, 6)


class Named(Tensor):
    """A user's kind of tensor."""


@torch.library.custom_op("grappe_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """An operator that grappe has no rule for."""
    return torch.from_numpy(x.numpy() * 2)


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    function.__name__: function
    for function in (written_by_index, sums_and_their_views, views_in_place, own_function, per_sample, without_autograd)
} | {
    "custom": lambda x, y: doubled(x.detach()),
    "gram": lambda x, y: (x[:, 0] @ x[:, 0].t()).exp().sum(),
    "flat": lambda x, y: x.transpose(0, 1).reshape(-1, 6).view(4, -1, 6).transpose(0, 1).flatten(),
    "squeezed": lambda x, y: x.unsqueeze(1).squeeze(1).sum(1),
    "pairs": lambda x, y: x[:, 0, None, :] - x[None, :, 0, :],
    "outer": lambda x, y: F.batch_norm(torch.cat([x, x * 2]).view(-1, 24), None, None, training=True),
    "halves": lambda x, y: torch.cat([x, x * 2]).chunk(2)[1] * 3,
    "labels": lambda x, y: F.cross_entropy(x[:, 0], y, torch.arange(6.0) + 1, ignore_index=2, label_smoothing=0.1),
    "picked": lambda x, y: x[:, 0].log_softmax(-1)[torch.arange(len(x)), y].mean(),
    "statistics": lambda x, y: x.std(0) + x.amax(0) + x.norm() + x.mean(),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True),
    "draws": lambda x, y: F.dropout(x, 0.4) * torch.randn_like(x) + torch.rand(6),
    "complex": lambda x, y: torch.view_as_real(torch.fft.fft(x).conj() * 1j).sum(-1),
    "sparse": lambda x, y: x.detach().flatten(1).to_sparse().to_dense(),
    "neighbours": lambda x, y: torch.spmm(torch.eye(len(x)).roll(1, 0).to_sparse(), x[:, 0]),
    "neighbours_by_row": lambda x, y: torch.eye(len(x)).roll(1, 0).to_sparse_csr() @ x[:, 0],
    "subclass": lambda x, y: x * torch.ones(6).as_subclass(Named),
    "weights": lambda x, y: F.embedding(y, F.linear(torch.eye(4), torch.ones(6, 4))) + x[:, 0],
}


def as_plain(process: ProcessRank, folder: Path) -> list[str]:
    """Names forms that differ from plain tensors."""
    wrong = []
    with sharing(process, folder):
        for sizes in SIZES:
            generator = torch.Generator().manual_seed(1)
            x = torch.randn(sum(sizes), 4, 6, generator=generator)
            y = torch.randint(4, (sum(sizes),), generator=generator)
            for name, form in FORMS.items():
                if sum(sizes) == 1 and name in ("statistics", "labels"):
                    continue
                plain = outcome(form, x.clone(), y.clone())
                rows = outcome(form, split(x.clone(), sizes=sizes), split(y.clone(), sizes=sizes))
                alike = [torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(plain, rows, strict=True)]
                alike += [a.shape == b.shape and a.dtype == b.dtype for a, b in zip(plain, rows, strict=True)]
                wrong += [] if all(alike) else [f"{name} {sizes}"]
    return wrong


def outcome(form: Callable[[Tensor, Tensor], Any], x: Tensor, y: Tensor) -> list[Tensor]:
    torch.manual_seed(5)
    x = x.detach().requires_grad_()
    made = form(x, y)
    results = [full(made).detach(), torch.rand(2)]
    if made.requires_grad:
        (made * torch.cos(torch.arange(made.numel(), dtype=made.dtype)).view(made.shape)).sum().backward()
        results.append(full(x.grad))
    return results


def test_any_form_is_as_with_plain_tensors(pool: Pool) -> None:
    assert pool.run(f"{__name__}:as_plain", 3) == [[], [], []]


# ---- Memory ------------------------------------------------------------------------------------------------


def memory(process: ProcessRank, folder: Path) -> None:
    """Fails if memory is not shared where plain tensors share it, or a reader of pointers is not refused."""
    with sharing(process, folder):
        plain = torch.arange(20.0).view(5, 4)
        rows = split(plain.clone())
        array = rows.numpy()
        array *= 2
        assert torch.equal(full(rows + 0), plain * 2)
        viewed = split(plain.clone())
        row, view = viewed[1], viewed.view(-1)
        for each in (viewed, row, view):
            with pytest.raises(ValueError, match="read-only"):
                each.numpy()[0] = 1

        rows = split(plain.clone())
        before, half = rows.clone(), rows.to(torch.float32)
        rows.view(-1).mul_(2)
        rows[0] = 1
        assert torch.equal(full(before), plain)
        assert torch.equal(full(half), plain.float())

        origin = plain.clone()
        rows = split(origin, shared=True)
        doubled_view = rows.view(-1, 2)
        rows[1] = -1
        assert torch.equal(origin[1], torch.full((4,), -1.0))
        origin[4] = 9
        origin.t()[0] = 5
        assert torch.equal(full(rows * 1), origin)
        assert torch.equal(full(doubled_view * 1), origin.view(-1, 2))
        gaps = plain.clone()[:, 1:]
        for shared in (False, True):
            assert torch.equal(full(split(gaps, shared=shared).flatten()), gaps.flatten())
        across = split(origin, 1, shared=True)
        origin.mul_(3)
        assert torch.equal(full(across + 0), origin)

        leaf = split(plain.clone()).requires_grad_()
        for other in (copy.deepcopy(leaf), pickle.loads(pickle.dumps(leaf)), copy.copy(leaf)):
            assert other.requires_grad
            assert torch.equal(full(other).detach(), plain)
        assert type(pickle.loads(pickle.dumps(leaf))) is Tensor
        with torch.no_grad():
            copy.deepcopy(leaf).mul_(2)
            assert torch.equal(full(leaf).detach(), plain)
            copy.copy(leaf).mul_(2)
            assert torch.equal(full(leaf).detach(), plain * 2)

        other = split(plain.clone())
        other.data.mul_(2)
        other.data = other.data * 2
        assert torch.equal(full(other + 0), plain * 4)
        assert torch.equal(torch.tensor([other[1, 1], other.sum()]), torch.stack([plain[1, 1] * 4, plain.sum() * 4]))

        rows = split(plain)
        for name, *arguments in (("data_ptr",), ("untyped_storage",), ("resize_", 2), ("set_",), ("share_memory_",)):
            with pytest.raises(GrappeError, match=rf"Tensor.{name} of rows .*test_tensor.py:\d+"):
                getattr(rows, name)(*arguments)
        with pytest.raises(GrappeError, match="__dlpack__"):
            torch.from_dlpack(rows)
        with pytest.raises(RuntimeError, match="data pointer"):
            torch.utils.dlpack.to_dlpack(rows)
        with pytest.raises(GrappeError, match="take a clone"):
            torch.ops.aten.resize_(rows, [3])
        with pytest.raises(GrappeError, match="nested"):
            rows + torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)

        local = from_local(local_rows(split(plain)).clone(), Placement(0, (2, 2, 1)))
        assert torch.equal(full(local), plain)
        assert f"{split(plain).sum():.1f} {split(plain)[0, 1]}" == f"{plain.sum():.1f} {plain[0, 1]}"
        assert repr(split(plain)) == repr(plain)
        assert [*map(float, split(plain)[:, 0])] == plain[:, 0].tolist()
        assert isinstance(nn.Parameter(split(plain)), Rows)


def test_memory_is_shared_or_refused(pool: Pool) -> None:
    pool.run(f"{__name__}:memory", 3)


# ---- In step -----------------------------------------------------------------------------------------------


def straying(process: ProcessRank, folder: Path) -> list[str]:
    """Returns what a process says that computed what the others did not, and what a thread says."""
    with sharing(process, folder) as context:
        rows = split(torch.ones(6, 2)) * 1
        if process.rank == 1:
            rows * 2
        with pytest.raises(ProcessAstray) as strayed:
            full(rows)
        errors: list[BaseException] = []

        def read() -> None:
            try:
                full(rows * 2)
            except GrappeError as error:
                errors.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        context.trace = 0
        for _ in range(2):
            rows.flip(0)
        return [
            str(strayed.value),
            str(errors[0]),
            *(f"{at.line}, {at.operator}: {count}" for at, count in context.gathered.items()),
        ]


def test_a_process_that_strays_and_a_thread_are_named(pool: Pool) -> None:
    for strayed, thread, line in pool.run(f"{__name__}:straying", 3):
        assert "process 1 has computed something else than others: process 0 is at test_tensor.py:" in strayed
        assert "a thread of the script reads rows" in thread
        assert line.startswith("test_tensor.py:")
        assert "flip.default" in line
