"""Draws for a microbatch's rows are those of one process that draws for the whole batch."""

import contextlib
import functools
import weakref
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from grappe.data import whole_batch_draws as module
from grappe.data.batch import BatchRows, InModel
from grappe.data.whole_batch_draws import (
    OWN_DRAWS,
    enter_split_layers,
    layer_by_layer,
    leave_split_layers,
    whole_batch_draws,
)
from grappe.private_api.torch import replace_recurrent, tree_leaves
from grappe.verbs.verify.random_ops import RandomOps

ROWS = 13
CUTS = ((0, 4), (4, 10), (10, 13))
ATTENTION = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
LSTM = nn.LSTM(8, 8, 2, dropout=0.4, batch_first=True)
Draw = Callable[[Tensor], Tensor]


def deep(x: Tensor) -> Tensor:
    return x[..., None].expand(-1, -1, -1, 3)


DRAWS: dict[str, Draw] = {
    "Dropout": lambda x: F.dropout(x, 0.3),
    "Dropout, channels last": lambda x: F.dropout(deep(x).contiguous(memory_format=torch.channels_last), 0.3),
    "Dropout1d": lambda x: F.dropout1d(x, 0.3),
    "Dropout2d": lambda x: F.dropout2d(deep(x), 0.3),
    "AlphaDropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "FeatureAlphaDropout": lambda x: F.feature_alpha_dropout(x, 0.3, True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "drop path": lambda x: x * x.new_empty(len(x), 1, 1).bernoulli_(0.8),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli(p)": lambda x: torch.bernoulli(x, 0.4),
    "rand": lambda x: torch.rand(x.shape),
    "randn": lambda x: torch.randn(x.shape, dtype=torch.float64),
    "randint": lambda x: torch.randint(0, 9, (len(x),)),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
    "uniform_ of a transposed tensor": lambda x: torch.empty_like(x.transpose(1, 2)).uniform_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "gumbel_softmax": F.gumbel_softmax,
    "rsample": lambda x: torch.distributions.Normal(x, x.abs() + 1).rsample(),
    "a number for all": lambda x: x * torch.rand(()),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(*[x[:, None]] * 3, dropout_p=0.4),
    "MultiheadAttention": lambda x: ATTENTION(x, x, x)[0],
    "MultiheadAttention without weights": lambda x: ATTENTION(x, x, x, need_weights=False)[0],
    "LSTM": lambda x: LSTM(x)[0],
}


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("name", DRAWS)
def test_rows_have_the_whole_batchs_numbers_and_the_generator_goes_as_far(name: str, watched: bool) -> None:
    """Also in a dispatch mode, which watches the first forward of a training, and each of verify's."""
    x = torch.randn(ROWS, 5, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(3)
    wanted, after = DRAWS[name](x), torch.get_rng_state()
    for first, last in CUTS:
        torch.manual_seed(3)
        watch = RandomOps(off=False) if watched else contextlib.nullcontext()
        with whole_batch_draws(BatchRows(first, last - first, ROWS)), watch:
            found = DRAWS[name](x[first:last])
        torch.testing.assert_close(found, wanted[first:last])
        assert watched or torch.equal(after, torch.get_rng_state())


def test_rows_of_padding_and_gradients() -> None:
    """Two rows of padding after the batch's last row have some numbers; dropout's gradient is its mask."""
    x = torch.ones(5, 4, requires_grad=True)
    torch.manual_seed(3)
    with whole_batch_draws(BatchRows(10, 5, ROWS)):
        out = F.dropout(x, 0.5)
    out.sum().backward()
    torch.manual_seed(3)
    assert torch.equal(out[:3], F.dropout(torch.ones(ROWS, 4), 0.5)[10:])
    assert torch.equal(x.grad, out.detach())  # type: ignore[arg-type]


HEADS: dict[str, Draw] = {
    "hidden units": lambda x: F.dropout(x, 0.3),
    "chances": lambda x: torch.bernoulli(x.sigmoid()),
    "hidden units on a GPU": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "heads of 2": lambda x: F.dropout(x.unflatten(-1, (-1, 2)), 0.3).flatten(2),
    "heads of 2 before time": lambda x: (
        F.dropout(x.unflatten(-1, (-1, 2)).transpose(1, 2), 0.3).transpose(1, 2).flatten(2)
    ),
    "attention": lambda x: (
        F.scaled_dot_product_attention(*[x.unflatten(-1, (-1, 2)).transpose(1, 2)] * 3, dropout_p=0.4)
        .transpose(1, 2)
        .flatten(2)
    ),
    "noise for rows": lambda x: x * torch.rand(len(x), 1, 1) + torch.rand(()),
}


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("rows", [(0, ROWS), (4, 10)])
@pytest.mark.parametrize("name", HEADS)
def test_columns_between_split_layers_have_the_whole_layers_numbers(name, rows, processes):
    """A process's columns are those of one process, and the next draw, where all columns are there again, is too."""
    x = torch.randn(ROWS, 5, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(3)
    wanted, after = HEADS[name](x), F.dropout(torch.ones(ROWS, 6), 0.5)
    (first, last), parts = rows, []
    for rank in range(processes):
        torch.manual_seed(3)
        with whole_batch_draws(BatchRows(first, last - first, ROWS)):
            columns = x[first:last].chunk(processes, -1)[rank].contiguous()
            enter_split_layers(columns, rank, processes)
            parts.append(HEADS[name](columns))
            leave_split_layers()
            assert torch.equal(F.dropout(torch.ones(last - first, 6), 0.5), after[first:last])
    torch.testing.assert_close(torch.cat(parts, -1), wanted[first:last])


@pytest.mark.parametrize("rows", [(0, ROWS), (4, 10)])
def test_heads_in_one_dimension_with_the_rows_are_a_processs_own_and_said(rows: tuple[int, int]) -> None:
    OWN_DRAWS.clear()
    found = []
    for rank in range(2):
        torch.manual_seed(3)
        with whole_batch_draws(BatchRows(rows[0], rows[1] - rows[0], ROWS)):
            enter_split_layers(torch.ones(rows[1] - rows[0], 5, 4), rank, 2)
            found.append(F.dropout(torch.ones(2 * (rows[1] - rows[0]), 5, 5), 0.5))
    assert not torch.equal(*found)
    assert {"bernoulli_"} == OWN_DRAWS


OWN: dict[str, Draw] = {
    "poisson": lambda x: torch.poisson(x.exp()),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 9.0), torch.full_like(x, 0.3)),
    "_standard_gamma": lambda x: torch.distributions.Gamma(x.exp(), 1.0).sample(),
    "_sample_dirichlet": lambda x: torch.distributions.Dirichlet(x.exp()).sample(),
    "multinomial": lambda x: torch.multinomial(x[:, 0].exp(), 2),
    "normal": lambda x: torch.normal(x, 2.0),
    "randperm": lambda x: torch.randperm(50),
    "rrelu_with_noise": lambda x: F.rrelu(x, training=True),
    "uniform_": lambda x: torch.rand(7, 2),  # the nodes of a graph, say
    "random_": lambda x: torch.empty((), dtype=torch.int64).random_(),  # another generator's seed
    "random_ below 2^31": lambda x: torch.randint(2**31, (1,)),
    "native_dropout of jagged tensors": lambda x: F.dropout(
        torch.nested.as_nested_tensor([x[0], x[1, :3]], layout=torch.jagged), 0.5
    ).values(),
}


@pytest.mark.parametrize("name", OWN)
def test_what_has_no_rows_is_each_microbatchs_own_and_said(name: str) -> None:
    x, found = torch.randn(4, 5, 8), []
    OWN_DRAWS.clear()
    for first in (0, 4, 0):
        torch.manual_seed(3)
        with whole_batch_draws(BatchRows(first, 4, ROWS)):
            found.append(OWN[name](x))
    assert not torch.equal(found[0], found[1]), "two microbatches draw the same"
    assert torch.equal(found[0], found[2])
    assert {name.partition(" ")[0]} == OWN_DRAWS


def test_other_draws_are_torchs() -> None:
    """Those with a generator of the user's, and all outside of the context."""
    own = torch.Generator().manual_seed(1)
    with whole_batch_draws(BatchRows(0, 4, ROWS)):
        found = torch.rand(4, 3, generator=own)
        with whole_batch_draws(None):
            torch.manual_seed(1)
            assert torch.equal(torch.rand(4, 3), found)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(4, 3), found)


def test_a_mask_of_a_gpu_is_kept_without_other_rows() -> None:
    with whole_batch_draws(BatchRows(0, 4, ROWS)):
        mask = torch.native_dropout(torch.ones(4, 3), 0.5, True)[1]
    assert mask.untyped_storage().nbytes() == mask.numel()


def test_chances_are_not_kept_in_memory() -> None:
    chances = torch.full((4, 3), 0.5)
    kept = weakref.ref(chances)
    with whole_batch_draws(BatchRows(0, 4, ROWS)):
        torch.bernoulli(chances)
    del chances
    assert kept() is None


def test_operators_in_python_are_torchs() -> None:
    x = torch.ones(4)
    with whole_batch_draws(BatchRows(0, 4, ROWS)):
        found = torch.ops.higher_order.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
    assert torch.equal(found[0] if isinstance(found, tuple) else found, x + 1)


class MockGpuGenerator:
    """A GPU's generator: a seed and an offset."""

    def __init__(self) -> None:
        self.seed, self.offset = 7, 40

    def get_state(self) -> tuple[int, int]:
        return self.seed, self.offset

    def set_state(self, state: tuple[int, int]) -> None:
        self.seed, self.offset = state

    def manual_seed(self, seed: int) -> None:
        self.seed, self.offset = seed, 0

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


def test_fused_attention_of_a_mock_gpu_draws_its_own_and_leaves_the_generator_as_one_process_does() -> None:
    generator, seeds = MockGpuGenerator(), []
    query = mock.Mock(spec=Tensor, device=torch.device("cuda", 0), numel=lambda: 8)

    def operator(query: Tensor, *arguments: object) -> None:
        seeds.append(generator.seed)
        generator.offset += 32 * 4

    operator.overloadpacket = mock.Mock(__name__="fused")  # type: ignore[attr-defined]
    with (
        mock.patch.object(torch.cuda, "default_generators", (generator,)),
        mock.patch.object(module, "_torchs_own", lambda tensor, _: InModel.place),
    ):
        for first in (0, 4):
            torch.manual_seed(3)
            generator.set_state((7, 40))
            InModel.place = BatchRows(first, 4, 12)
            module._fused(operator, query, query, query, 0.1, False)
            assert generator.get_state() == (7, 40 + 32 * 12)
        module._fused(operator, query, query, query, 0.0, False)
        InModel.place = None
    assert len(set(seeds)) == 3, "two microbatches draw the same"
    assert seeds[2] == 7, "without dropout nothing is drawn"


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(5, 6, 3, dropout=0.4, bidirectional=True),
        nn.LSTM(5, 6, 2, dropout=0.4, proj_size=3),
        nn.GRU(5, 6, 2, dropout=0.4, bias=False),
        nn.RNN(5, 6, 3, dropout=0.4, nonlinearity="relu"),
    ],
    ids=["lstm", "projected", "gru", "rnn"],
)
def test_recurrent_layers_one_by_one_have_torchs_numbers(layer, packed, batch_first, monkeypatch):
    """On a GPU cuDNN's dropout has a state of its own; here each layer by itself is compared with torch's on a CPU."""
    rows = torch.randn(4, 3, 5)
    inputs = pack_padded_sequence(rows, torch.tensor([4, 3, 1] if not batch_first else [3, 3, 2, 1]), batch_first)
    monkeypatch.setattr(layer, "batch_first", batch_first)

    def outputs() -> list[Tensor]:
        torch.manual_seed(0)
        found = tree_leaves(layer(inputs if packed else rows))
        return [each for each in found if isinstance(each, Tensor)]

    expected = outputs()
    own = torch.nn.modules.rnn._VF
    monkeypatch.setattr(torch.nn.modules.rnn, "_VF", own)
    called: list[int] = []

    def counted(function: Callable[..., object], *arguments: object) -> object:
        return layer_by_layer(lambda *of_one: called.append(1) or function(*of_one), *arguments, everywhere=True)

    replace_recurrent(lambda function: functools.partial(counted, function))
    found = outputs()
    assert len(called) == layer.num_layers
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    layer.eval()
    assert len(outputs()) and len(called) == layer.num_layers + 1
    layer.train()
