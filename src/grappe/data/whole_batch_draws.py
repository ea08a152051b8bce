"""whole_batch_draws: a microbatch's rows get the random numbers that one process would draw for the whole batch.

Inside, an operator that draws for the rows of the microbatch (dropout, randn_like, drop path) draws for all rows of the
global batch from torch's generator, and keeps the microbatch's own. Where every microbatch begins with the same
generator, all of them together have the numbers of one process that takes the whole batch at once. Operators are
intercepted in torch's dispatcher, so those that C++ calls are too, and nothing else becomes slower.

Under tensor parallelism an activation between two split layers has a part of its columns: draws there are for all.

Shapes: a microbatch of b rows, in a global batch of N rows.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grappe.data.batch import BatchRows, InModel
from grappe.data.draw import mix
from grappe.private_api import torch as private
from grappe.rows.context import NOW
from grappe.rows.draws import pass_over, words_each
from grappe.rows.tensor import Rows


class _Cut(NamedTuple):
    """The part of one dimension of a whole draw that is this process's."""

    dimension: int
    first: int
    size: int
    of: int
    """The size of the whole draw's dimension."""


class _Kept(NamedTuple):
    """The part of a whole draw that is kept: a microbatch's rows and, between layers split by tensor=, own columns."""

    rows: _Cut | None
    columns: _Cut | None = None

    def take(self, drawn: Tensor) -> Tensor:
        """Returns the part of what was drawn for all."""
        for cut in self:
            if cut is not None and cut.first + cut.size <= cut.of:
                drawn = drawn.narrow(cut.dimension, cut.first, cut.size)
            elif cut is not None:
                drawn = drawn.index_select(cut.dimension, _places(cut, drawn))
        return drawn


class Columns(NamedTuple):
    """The part of each activation's last dimension that a process has between two layers that tensor= splits."""

    rank: int
    processes: int
    shapes: frozenset[tuple[int, int]]
    """Outputs of the layers before: the number of dimensions of each, and the size of its last one."""


_NOTHING = _Kept(_Cut(0, 0, 0, 0))
OWN_DRAWS: set[str] = set()
"""The operators that drew numbers of a microbatch's own, in this process."""
SAME_DRAWS: set[str] = set()
"""The operators of others than torch whose kernels drew the same numbers in every microbatch, in this process."""


class MeanDraws:
    """Tells whether a mode below replaces each draw by its mean, as verify does: dropout then keeps every value."""

    on = False


class _Now:
    """Not per thread, as InModel."""

    kept: _Kept | None = None
    columns: Columns | None = None
    intercepted = 0
    """Draws from torch's generator so far that were intercepted."""


@contextlib.contextmanager
def whole_batch_draws(rows: BatchRows | None) -> Iterator[None]:
    """Context in which draws are those of the whole batch for `rows`; None: those of torch.

    A draw's rows are found by its shape: its first dimension is b (`nn.Dropout`, drop path), or else its second one
    (time before samples: `nn.LSTM`), or else the first is a multiple of b (attention's heads). A single number is drawn
    for all rows. Any other draw, and one whose operator needs more or fewer numbers by what it is given
    (`torch.poisson`), is the microbatch's own: no other microbatch has it, but not one process either.
    """
    if rows is not None:
        _registered()
    before, InModel.place = InModel.place, rows
    columns, _Now.columns = _Now.columns, None
    was_on = private.set_intercepting(rows is not None)
    try:
        yield
    finally:
        InModel.place, _Now.columns = before, columns
        private.set_intercepting(was_on)


def enter_split_layers(output: Tensor, rank: int, processes: int) -> None:
    """Tells that `output` [..., w] has w columns of those that `processes` processes have: draws are for all of them.

    Until `leave_split_layers`, a draw's columns are found by its shape: a last dimension of w, or attention's heads in
    [b, heads, time, time], [b, heads, time, width] or [b, time, heads, width]. A draw without any is each process's
    alike.
    """
    before = _Now.columns.shapes if _Now.columns is not None else frozenset()
    _Now.columns = Columns(rank, processes, before | {(output.dim(), output.shape[-1])})


def leave_split_layers() -> None:
    """Tells that activations have all their columns again."""
    _Now.columns = None


def own_rows(drawn: Tensor) -> Tensor:
    """Returns the microbatch's rows of what an operator draws for the whole batch now; otherwise `drawn`."""
    return drawn if _Now.kept is None else _Kept(_Now.kept.rows).take(drawn)


def _places(cut: _Cut, drawn: Tensor) -> Tensor:
    """Returns the places of the microbatch's rows; rows of padding after the batch's last have the first ones'."""
    places = torch.arange(cut.first, cut.first + cut.size, device=drawn.device)
    return places.remainder_(cut.of)


@functools.cache
def _registered() -> Any:
    """Registers the functions that run instead of torch's operators inside whole_batch_draws."""
    draw_outside_cudnn()
    kinds = {_filled: FILLS, _own: OWN, _native_dropout: DROPOUTS, _fused: FUSED}
    return private.intercept({name: _around(function) for function, names in kinds.items() for name in names})


def _around(function: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    """Returns, for an operator, the function that runs instead of it."""

    def made(operator: Any) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            was_on = private.set_intercepting(False)
            try:
                if type(arguments[0]) is Rows:  # which draws for all rows: of the batch, or of the samples
                    if NOW.context.exchanges:
                        NOW.context.draw = _intercepted
                    return operator(*arguments, **options)
                return function(operator, *arguments, **options)
            finally:
                private.set_intercepting(was_on)

        return run

    return made


def _intercepted(operator: Any, *arguments: Any, **options: Any) -> Any:
    was_on = private.set_intercepting(True)
    try:
        return private.call_in_mode(operator, arguments, options)
    finally:
        private.set_intercepting(was_on)


# ---- Operators that draw for rows --------------------------------------------------------------------------

FILLS = (
    "bernoulli_.float", "bernoulli_.Tensor", "uniform_", "normal_", "exponential_", "geometric_", "log_normal_",
    "cauchy_", "random_", "random_.from", "random_.to",
)  # fmt: skip
"""rand, randn_like, randint, bernoulli and dropout on a CPU end in one of these."""


def _filled(operator: Any, tensor: Tensor, *arguments: Any, generator: Any = None, **options: Any) -> Tensor:
    rows = _torchs_own(tensor, generator)
    if rows is None:
        return operator(tensor, *arguments, generator=generator, **options)
    part = _part(tensor, rows)
    if part is None:
        # A single integer of 24 bits or more seeds other draws.
        draws_integer, most = operator.overloadpacket is torch.ops.aten.random_, arguments[-1] if arguments else None
        if tensor.numel() == 1 and not (draws_integer and (most is None or most >= 1 << 24)):
            return operator(tensor, *arguments, **options)
        with _own_stream(operator, tensor, rows):
            return operator(tensor, *arguments, **options)
    if part == _UNCUT:
        return operator(tensor, *arguments, **options)
    cut = part.rows if part.columns is None else None
    in_order = cut is not None and not cut.dimension and cut.first + cut.size <= cut.of and tensor.is_contiguous()
    plain = tensor.device.type == "cpu" and not any(isinstance(each, Tensor) for each in arguments)
    if cut is not None and in_order and plain and (words := words_each(operator, tensor.dtype, arguments)):
        each = words * (tensor.numel() // cut.size)
        with _drawing(_NOTHING):
            pass_over(each * cut.first)
        operator(tensor, *arguments, **options)
        with _drawing(_NOTHING):
            pass_over(each * (cut.of - cut.first - cut.size))
        return tensor
    with _drawing(part):
        drawn = _for_all(tensor, part)
        if arguments and isinstance(arguments[0], Tensor):  # chances: others' do not change how many are drawn
            chances = arguments[0].detach().expand_as(tensor)
            arguments = (_spread(chances, drawn, part), *arguments[1:])
        operator(drawn, *arguments, **options)
        return tensor.copy_(part.take(drawn))


def _spread(chances: Tensor, drawn: Tensor, part: _Kept) -> Tensor:
    """Returns chances for all that is drawn: this process's, and 0.5 for others'."""
    for cut in (part.columns, part.rows):
        if cut is not None:
            shape = [*chances.shape]
            shape[cut.dimension] = cut.of
            everyone = chances.new_full(shape, 0.5)
            chances = everyone.index_copy_(cut.dimension, _places(cut, drawn), chances.contiguous())
    return torch.empty_like(drawn, dtype=chances.dtype).copy_(chances)


DROPOUTS = ("native_dropout",)
"""Dropout on a GPU."""


def _native_dropout(operator: Any, tensor: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    rows = _torchs_own(tensor, None)
    if rows is None or train is False:
        return operator(tensor, p, train)
    part = _part(tensor, rows)
    if part is None:
        with _own_stream(operator, tensor, rows):
            return operator(tensor, p, train)
    if MeanDraws.on or part == _UNCUT:
        return operator(tensor, p, train)
    with _drawing(part):  # cloned, or the whole batch's would be kept for backward
        mask = part.take(operator(_for_all(tensor.detach(), part), p, True)[1]).clone()
    return tensor * mask * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), mask


@functools.cache
def draw_outside_cudnn() -> None:
    """Has cuDNN compute recurrent layers with dropout one by one in this process, with torch's dropout between them.

    cuDNN's own dropout draws from a state which no checkpoint has and which is alike in every process.
    """
    # Their weights are apart then, and under FSDP2, which is right here.
    warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
    if torch.cuda.device_count():  # which does not initialise CUDA: this process may fork
        private.replace_recurrent(_by_layer)


def _by_layer(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes what runs instead of torch's function, outside of compiled graphs: torch 2.8 changes its numbers there."""

    @functools.cache  # at the first call: it imports the compiler
    def made() -> Callable[..., Any]:
        return torch.compiler.disable(functools.partial(layer_by_layer, function))

    def run(*arguments: Any) -> Any:
        return made()(*arguments)

    return run


def layer_by_layer(function: Callable[..., Any], *arguments: Any, everywhere: bool = False) -> tuple[Tensor, ...]:
    """Calls torch's lstm, gru or rnn for each layer by itself, where dropout between layers is to be drawn on a GPU.

    Args:
        arguments: the inputs (of packed sequences the batch sizes, too), the first states, the list of weights, and so
            on, as torch.nn.LSTM gives them.
        everywhere: not on a GPU alone.
    """
    place = 2 if isinstance(arguments[2], list) else 3  # of the weights
    inputs, *batch_sizes = arguments[: place - 1]
    biases, layers, dropout, training, both_ways, *batch_first = arguments[place + 1 :]
    if not (training and dropout and layers > 1 and (everywhere or inputs.is_cuda)):
        return function(*arguments)
    states, weights, ends = arguments[place - 1], arguments[place], []
    several = not isinstance(states, Tensor)
    for layer in range(layers):
        if layer:  # time comes first, as in torch's own dropout
            time_first = inputs.transpose(0, 1) if any(batch_first) else inputs
            time_first = nn.functional.dropout(time_first, dropout)
            inputs = time_first.transpose(0, 1) if any(batch_first) else time_first
        own = tuple([each.chunk(layers)[layer] for each in (states if several else [states])])
        part = len(weights) // layers
        of_layer = weights[layer * part : (layer + 1) * part]
        inputs, *last = function(
            inputs, *batch_sizes, own if several else own[0], of_layer, biases, 1, 0.0, True, both_ways, *batch_first
        )
        ends.append(last)
    return (inputs, *map(torch.cat, zip(*ends, strict=True)))


# ---- Operators whose draws stay the microbatch's own -------------------------------------------------------

OWN = (
    "poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "multinomial", "rrelu_with_noise",
    "rrelu_with_noise_", "randperm.generator_out", "normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor",
)  # fmt: skip
"""Functions whose number of draws depends on their input, that mix rows, or that need other rows' mean."""


def _own(operator: Any, *arguments: Any, **options: Any) -> Any:
    tensor = next(each for each in (options.get("out"), *arguments) if isinstance(each, Tensor))
    generator = next((each for each in (*arguments, *options.values()) if isinstance(each, torch.Generator)), None)
    rows = _torchs_own(tensor, generator)
    if rows is None:
        return operator(*arguments, **options)
    with _own_stream(operator, tensor, rows):
        return operator(*arguments, **options)


FUSED = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""Attention on a GPU, which draws inside its kernel."""


def _fused(operator: Any, tensor: Tensor, *arguments: Any, **options: Any) -> Any:
    rows = _torchs_own(tensor, None)
    rate = any(isinstance(argument, float) and argument for argument in (*arguments, options.get("dropout_p")))
    if rows is None or not rate:
        return operator(tensor, *arguments, **options)
    with _own_stream(operator, tensor, rows) as generator:
        result = operator(tensor, *arguments, **options)
        processes = 1 if _Now.columns is None else _Now.columns.processes
        used = generator.get_offset() // rows.size * rows.of * processes
    # As far on as after the whole batch's; offsets are multiples of 4.
    generator.set_offset(generator.get_offset() + -(-used // 4) * 4)
    return result


# ---- What they share ---------------------------------------------------------------------------------------


def _torchs_own(tensor: Tensor, generator: Any) -> BatchRows | None:
    """Returns the rows to draw for; None: torch draws as it would alone."""
    rows = InModel.place
    if rows is None or _all_here(rows) or not tensor.numel():
        return None
    if generator is not None:
        if tensor.dim() and tensor.shape[0] == rows.size:
            OWN_DRAWS.add("torch.Generator")
        return None
    _Now.intercepted += 1
    return rows if _is_plain(tensor) or not (private.is_dtensor(tensor) or private.is_traced(tensor)) else None


def _all_here(rows: BatchRows) -> bool:
    """Returns whether a draw is for all rows of the batch and all columns."""
    return rows.size >= rows.of and _Now.columns is None


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_nested


_UNCUT = _Kept(None)


def _part(tensor: Tensor, rows: BatchRows) -> _Kept | None:
    """Finds rows and columns in a draw's shape: what is to be kept of the whole batch's draw."""
    if not _is_plain(tensor):
        return None
    shape = tensor.shape
    dimension = next((number for number, size in enumerate(shape[:2]) if size == rows.size), None)
    several = dimension is None and shape and not shape[0] % rows.size
    each = shape[0] // rows.size if several else 1
    columns = _columns(shape, dimension or 0)
    if each > 1 and columns is None and _Now.columns is not None:
        return None  # heads in one dimension with the rows
    if rows.size >= rows.of:
        return _Kept(None, columns)
    if dimension is None and each == 1:
        return None
    return _Kept(_Cut(dimension or 0, each * rows.first, shape[dimension or 0], each * rows.of), columns)


def _columns(shape: torch.Size, rows_dimension: int) -> _Cut | None:
    """Finds the columns in a draw's shape, between layers that tensor= splits."""
    columns = _Now.columns
    if columns is None or not shape:
        return None
    if (len(shape), shape[-1]) in columns.shapes:
        dimension = len(shape) - 1
    elif len(shape) == 4 and not rows_dimension and shape[2:].numel() > 1:
        widths = {width for _, width in columns.shapes}
        by_time = shape[1] * shape[3] not in widths and shape[2] * shape[3] in widths  # [b, time, heads, width]
        dimension = 2 if by_time else 1
    else:
        return None
    size = shape[dimension]
    return _Cut(dimension, columns.rank * size, size, columns.processes * size)


@contextlib.contextmanager
def _drawing(part: _Kept | None) -> Iterator[None]:
    _Now.kept = part
    try:
        yield
    finally:
        _Now.kept = None


def _for_all(tensor: Tensor, part: _Kept) -> Tensor:
    """Makes a tensor for the whole batch, without values, laid out like `tensor`: torch draws in memory's order."""
    shape = list(tensor.shape)
    for cut in part:
        if cut is not None:
            shape[cut.dimension] = cut.of
    if part.columns is None and tensor.is_contiguous():
        return tensor.new_empty(shape)
    # A dimension of size 1, say a process's only head, is contiguous in any place: its stride tells where it was.
    order = sorted(range(tensor.dim()), key=lambda dimension: (-tensor.stride(dimension), tensor.shape[dimension] == 1))
    return torch.empty_permuted(shape, order, dtype=tensor.dtype, device=tensor.device)


@contextlib.contextmanager
def _own_stream(operator: Any, tensor: Tensor, rows: BatchRows) -> Iterator[torch.Generator]:
    """Context in which torch's generator has a seed that no other microbatch of the step has, and no other columns.

    A forward that runs again has the same seed again.
    """
    OWN_DRAWS.add(operator.overloadpacket.__name__)
    columns = 0 if _Now.columns is None else _Now.columns.rank
    seed = mix(int(torch.empty((), dtype=torch.int64).random_()), rows.first + columns * rows.of)
    generator = torchs_generator(tensor.device)
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield generator
    finally:
        generator.set_state(before)


# ---- Operators that are not torch's ------------------------------------------------------------------------


def torchs_generator(device: torch.device) -> torch.Generator:
    """Returns the generator that torch draws from on a device."""
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


@contextlib.contextmanager
def noting_own_kernels(operator: Any, arguments: Any) -> Iterator[None]:
    """Context of an operator's call that adds the operator to SAME_DRAWS, if it is not torch's and its kernel draws.

    A kernel that draws from torch's generator by itself, as flash-attn's does, cannot be intercepted.
    """
    tensor = next((leaf for leaf in private.tree_leaves(arguments) if isinstance(leaf, Tensor)), None)
    rows = InModel.place
    if tensor is None or rows is None or _all_here(rows) or getattr(operator, "namespace", "") == "aten":
        yield
        return
    generator, intercepted = torchs_generator(tensor.device), _Now.intercepted
    before = generator.get_state()
    yield
    if intercepted == _Now.intercepted and not torch.equal(before, generator.get_state()):
        SAME_DRAWS.add(str(getattr(operator, "overloadpacket", operator)))
