"""CarriedState: what a model keeps in attributes, hidden states and counts say: saved, and kept apart in evaluation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from grappe.checkpoint.weights import Weights
from grappe.data.sampling import cut
from grappe.errors import RunError, TaskError
from grappe.launch.world import World
from grappe.parallel.attributes import (
    HOOKED,
    OF_LIBRARIES,
    OF_MODULES,
    Attributes,
    Place,
    attributes,
    copied,
    copied_attributes,
    is_state,
    own_modules,
    put_attributes,
)
from grappe.parallel.batchnorm import buffers_kept
from grappe.parallel.materialise import resizes_buffers
from grappe.plan import Plan
from grappe.private_api.torch import is_dtensor, local_tensor, module_buffers, tree_flatten, tree_leaves, tree_map
from grappe.rows.tensor import Rows, full

CARRIED = "carried."
"""`carried.SLICE`: attributes of the processes that train on slice `SLICE`, as JSON; `carried.SLICE.N`: a tensor."""
PIECE = 1 << 24  # numbers that are hashed at once


def content_hash(tensor: Tensor) -> int:
    """Returns a hash of a tensor's numbers; of a DTensor, of this process's part."""
    own = (local_tensor(tensor) if is_dtensor(tensor) else tensor).detach()
    digest, parts = xxhash.xxh3_64(), [own]
    if own.layout != torch.strided:
        ordered = own.to_sparse_coo().coalesce()
        parts = [ordered.indices(), ordered.values()]
    for piece in (piece for part in parts for piece in part.reshape(-1).split(PIECE)):
        digest.update(piece.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.intdigest()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Hashed:
    """A tensor, and the hash of the numbers that it had: a copy of a graph's features would take as much memory."""

    tensor: Tensor
    hash: int

    @property
    def shape(self) -> torch.Size:
        """Returns the tensor's shape."""
        return self.tensor.shape


def _hashed(leaf: Any) -> Any:
    if isinstance(leaf, torch.Generator):
        return leaf.clone_state()
    return Hashed(tensor=leaf, hash=content_hash(leaf)) if is_state(leaf) else leaf


def _equal(a: Any, b: Any) -> bool:
    (leaves, spec), (others, other_spec) = tree_flatten(a), tree_flatten(b)
    return spec == other_spec and all(map(_equal_leaves, leaves, others))


def _equal_leaves(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Generator) and isinstance(b, torch.Generator):
        a, b = a.get_state(), b.get_state()
    if isinstance(b, Hashed):
        return is_state(a) and (a.dtype, a.shape) == (b.tensor.dtype, b.tensor.shape) and content_hash(a) == b.hash
    if is_state(a) and is_state(b):
        return _equal_leaves(a, _hashed(b))
    return a is b or (isinstance(a, bool | int | float | str) and type(a) is type(b) and a == b)


def has_rows(value: Any, rows: int) -> bool:
    """Returns whether a value is tensors that have `rows` rows, in one dimension and no other, as a mask [L, L] has."""
    leaves = tree_leaves(value)
    return bool(leaves) and all(is_state(leaf) and leaf.shape.count(rows) == 1 for leaf in leaves)


@contextlib.contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Context in which a model changes copies of its attributes."""
    before = attributes(model)
    put_attributes(model, copied_attributes(model))
    try:
        yield
    finally:
        put_attributes(model, before)


@contextlib.contextmanager
def nothing_changed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Context in which forwards change no buffer and no attribute of the model, and no random generator."""
    generators = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with generators, buffers_kept(model), attributes_kept(model):
        yield


def gather_state(model: nn.Module) -> None:
    """Gathers what a forward has left in buffers and attributes, which every process then has. Collective."""
    for module in model.modules():
        for name, buffer in module_buffers(module).items():
            if type(buffer) is Rows:
                module_buffers(module)[name] = full(buffer).detach()
    for path, name, value in ((*place, value) for place, value in attributes(model).items()):
        if any(type(leaf) is Rows for leaf in tree_leaves(value)):
            gathered = tree_map(lambda leaf: full(leaf).detach() if type(leaf) is Rows else leaf, value)
            setattr(model.get_submodule(path), name, gathered)


class CarriedState:
    """The attributes of a model that change while it trains."""

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self._first: Attributes = {}
        self._shapes: dict[str, torch.Size] = {}
        self._plan = Plan()
        self._said: set[Place] = set()
        self.unread: set[Place] = set()
        """Attributes that a forward sets before it reads them; with rows, an activation say, they are not carried."""
        self.written: set[str] | None = set()
        """Parameters that a forward writes; None: a training has begun, and its first forward has not run."""
        self.rows = 0
        """Rows of the last microbatch."""
        self.remarks: list[str] = []
        self.evaluated = False
        """Whether an evaluation has begun."""
        self.repeated: str | None = None
        """The class of an optimizer that calls a closure: it runs the forward several times a step."""

    def note(self, text: str) -> None:
        """Notes what the user should know of the model, for the training's end."""
        self.remarks.append(text)

    def begin(self, model: nn.Module, plan: Plan) -> None:
        """Notes the attributes as they are: what differs later is carried."""
        self.model, self._first = model, tree_map(_hashed, attributes(model))
        # Nothing is compiled under the modes that would find them.
        self.written = {name for name, _ in model.named_parameters()} if plan.compile else None
        self._plan, self._shapes = plan, {name: buffer.shape for name, buffer in model.named_buffers()}

    def refuse_resized(self) -> None:
        """Raises TaskError where a buffer has another shape now, and the plan or a checkpoint cannot have that."""
        if self.model is None:
            return
        buffers = dict(self.model.named_buffers())
        for name in sorted(buffers.keys() & self._shapes.keys()):
            before, now = list(self._shapes[name]), list(buffers[name].shape)
            if before == now:
                continue
            changes = f"forward changes the shape of the buffer '{name}' from {before} to {now}"
            if self._plan.parts > 1:
                raise TaskError(
                    f"{changes}: under {self._plan} each process or microbatch would give it its own. Use one process "
                    "without microbatches, or give it its final shape in model()"
                )
            if not resizes_buffers(self.model.get_submodule(name.rpartition(".")[0])):
                raise TaskError(
                    f"{changes}, so that no checkpoint of it could be loaded: give it its final shape in model(), or "
                    "write _load_from_state_dict in its module"
                )

    def keep_first(self, before: Attributes) -> None:
        """Keeps the copies of those attributes that the first forward has changed, and no others.

        Args:
            before: copies of the attributes before it.
        """
        for place in self.changed(before).keys() & before.keys() & self._first.keys():
            if _equal(before[place], self._first[place]):  # not a checkpoint's
                self._first[place] = before[place]

    def changed(self, since: Attributes | None = None) -> Attributes:
        """Returns the attributes that are not what they were, at the beginning or in a copy `since`."""
        before = self._first if since is None else since
        return {
            place: value
            for place, value in ({} if self.model is None else attributes(self.model)).items()
            if not (place in self.unread and has_rows(value, self.rows))
            and not (place in before and _equal(value, before[place]))
        }

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Context of an evaluation: it changes no attribute, and begins without hidden states of training's rows."""
        if self.model is None:
            yield
            return
        with attributes_kept(self.model):
            values = attributes(self.model)
            for place, value in self.changed().items():
                first = self._first.get(place)
                if has_rows(value, self.rows) and _shapes(first) != _shapes(value):
                    del values[place]
                    made = tree_map(lambda leaf: leaf.tensor if isinstance(leaf, Hashed) else leaf, first)
                    values |= copied({place: made} if place in self._first else {})
            put_attributes(self.model, values)
            yield

    def tensors(self, world: World) -> dict[str, Tensor]:
        """Returns this data slice's attributes, to save; none if no slice has changed any. Collective."""
        values, tensors = self.changed(), list[Tensor]()
        staged = world.coordinates()["pipeline"][1] > 1
        changed = any(world.gather(bool(values)))
        if staged and changed and world.rank == 0 and not self._said:
            self.note(
                "the model's attributes change, and are not saved under pipeline=: a resumed training begins with them "
                "as model() makes them"
            )
            self._said.add(("", ""))
        if staged or not changed or not world.speaks_for_buffers:
            return {}
        trees: dict[str, dict[str, Any]] = {}
        for (path, name), value in values.items():
            try:
                trees.setdefault(path, {})[name] = _encoded(value, tensors)
            except TypeError as error:
                if (path, name) not in self._said | self.unread and world.rank == 0:
                    shown = f"{path}.{name}".lstrip(".")
                    self.note(
                        f"the model's attribute '{shown}' changes, and is not saved ({error}): a resumed training "
                        "begins with it as model() makes it"
                    )
                self._said.add((path, name))
        own = f"{CARRIED}{world.data_rank}"
        unread = sorted(self.unread & values.keys())
        text = json.dumps({"rows": self.rows, "attributes": trees, "unread": unread}).encode()
        named = {f"{own}.{number}": tensor for number, tensor in enumerate(tensors)}
        return {own: torch.frombuffer(bytearray(text), dtype=torch.uint8), **named}

    def restore(self, saved: Weights, world: World) -> None:
        """Restores a checkpoint's attributes; rows are cut again where the number of data slices is another.

        Raises:
            RunError: the slices differ in more than rows.
        """
        slices = sum(name.startswith(CARRIED) and name.count(".") == 1 for name in saved)
        if not slices or self.model is None:
            return
        texts = [json.loads(saved.read(f"{CARRIED}{n}").numpy().tobytes()) for n in range(slices)]
        alike = slices == world.data_size
        own = texts[world.data_rank if alike else 0]
        values, rows = attributes(self.model), [text["rows"] for text in texts]

        def read(number: int, place: Place) -> Tensor:
            if alike:
                return saved.read(f"{CARRIED}{world.data_rank}.{number}").clone()
            parts = [saved.read(f"{CARRIED}{n}.{number}") for n in range(slices)]
            # A model is made for no number of rows.
            made = parts[0].shape in _shapes(self._first.get(place))
            return _cut_again(parts, [] if made else rows, world)

        paths = {path for path, _ in own_modules(self.model)}
        for path, named in own["attributes"].items():
            for name, tree in named.items():
                if name == HOOKED:  # of an older checkpoint; here no hook is installed yet
                    continue
                if path not in paths or name in OF_MODULES or name.startswith(OF_LIBRARIES):
                    raise KeyError(name)
                try:
                    if not alike and any(text["attributes"].get(path, {}).get(name) != tree for text in texts):
                        raise RunError(_several(slices))
                    values[path, name] = _decoded(tree, functools.partial(read, place=(path, name)), world)
                except RunError:  # what no forward reads, the last loss say, may differ
                    if [path, name] not in own.get("unread", []):
                        raise
        put_attributes(self.model, values)
        self.rows = own["rows"]
        self.unread |= {(path, name) for path, name in own.get("unread", [])}


def _shapes(value: Any) -> list[Any]:
    return [getattr(leaf, "shape", None) for leaf in tree_leaves(value)]


def _several(slices: int) -> str:
    return (
        f"each of the {slices} data slices of this checkpoint has its own values in the model's attributes, which "
        f"cannot be joined by rows: resume with as many slices (replicate x shard = {slices})"
    )


def _cut_again(parts: list[Tensor], rows: list[int], world: World) -> Tensor:
    """Joins the slices' tensors along their rows, and returns this slice's part; without rows they must be equal."""
    shapes = [part.shape for part in parts]
    dims = [dim for dim in range(parts[0].dim()) if [shape[dim] for shape in shapes] == rows]
    if not dims and all(_equal_leaves(part, parts[0]) for part in parts):
        return parts[0].clone()
    if len(dims) != 1:
        raise RunError(_several(len(parts)))
    first, last = cut(sum(rows), world.data_size, world.data_rank)
    return torch.cat(parts, dims[0]).narrow(dims[0], first, last - first).clone()


def _encoded(value: Any, tensors: list[Tensor]) -> Any:
    """Encodes a value as JSON, its tensors by number; raises TypeError where it has anything else."""
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _encoded(entry, tensors) for key, entry in value.items()}}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_encoded(entry, tensors) for entry in value]}
    if value is None or type(value) in (bool, int, float, str):
        return {"plain": value}
    generator = isinstance(value, torch.Generator)
    if not generator and not is_state(value):
        raise TypeError(type(value).__name__)
    tensors.append(value.get_state() if generator else value)
    return {"generator" if generator else "tensor": len(tensors) - 1, "cuda": value.device.type == "cuda"}


def _decoded(tree: Any, read: Callable[[int], Tensor], world: World) -> Any:
    if "plain" in tree:
        return tree["plain"]
    if "dict" in tree:
        return {key: _decoded(entry, read, world) for key, entry in tree["dict"].items()}
    if "list" in tree or "tuple" in tree:
        kind = list if "list" in tree else tuple
        return kind(_decoded(entry, read, world) for entry in tree[kind.__name__])
    device = world.device if tree["cuda"] else torch.device("cpu")
    if "tensor" in tree:
        return read(tree["tensor"]).to(device)
    return torch.Generator(device).set_state(read(tree["generator"]))
