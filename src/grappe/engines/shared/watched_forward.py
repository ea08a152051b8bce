"""Watches a model's first forward in training: the parameters that it writes, and the attributes that it changes."""

from __future__ import annotations

import contextlib
import inspect
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from grappe.data.batch import Microbatch, entering
from grappe.data.whole_batch_draws import noting_own_kernels
from grappe.engines.base import EngineSetup
from grappe.engines.shared.after_step import SET_DATA, differing
from grappe.engines.shared.carried import attributes_kept, has_rows, nothing_changed
from grappe.errors import TaskError
from grappe.errors.user_line import place_in
from grappe.parallel.attributes import Place, copied_attributes, own_modules
from grappe.parallel.shard import reshard
from grappe.plan import Plan
from grappe.private_api import torch_dynamo
from grappe.private_api.torch import (
    TorchDispatchMode,
    call_in_mode,
    is_dtensor,
    local_tensor,
    operator_arguments,
    operator_mutates,
    tree_leaves,
)
from grappe.rows.tensor import Rows

SPREADERS = (os.path.join("torch", "distributed"), "deepspeed")  # noqa: PTH118 - parts of frames' file names
OF_MODES = (
    __file__, *(os.path.join("torch", name) for name in ("overrides.py", "_ops.py", "_compile.py")),  # noqa: PTH118
    os.path.join("torch", "_dynamo", "eval_frame.py"),  # noqa: PTH118
    call_in_mode.__code__.co_filename,
)  # fmt: skip
"""Files of the frames that modes put between a layer and its operator."""
INSTEAD = (
    "Write it in after_step(self, model) of the task, which runs after each optimizer step under every plan, or keep "
    "it in a buffer: register_buffer"
)
BeforeWrite = Callable[[str, nn.Parameter], None]


class WatchedForward:
    """Watches the first forward of an engine's training; later forwards cost nothing.

    A write to a parameter is kept where a process has the whole parameter and a step one forward; else it is refused.
    """

    def __init__(self, setup: EngineSetup, model: nn.Module) -> None:
        self._setup, self._model, self._carried = setup, model, setup.carried
        self.over = False
        """Whether the first forward has run."""
        self._carried.begin(model, setup.plan)

    def __call__(self, forward: Callable[[Any], Any], micro: Microbatch) -> Any:
        """Calls `forward` with the inputs of a microbatch. The first call is collective.

        Raises:
            TaskError: the plan cannot keep what the forward changes.
        """
        inputs, rows = entering(micro), micro.size
        self._carried.rows = rows
        if self.over:
            return forward(inputs)
        if not self._setup.plan.compile:
            with self.watching(rows):
                return forward(inputs)
        # Nothing is compiled under a mode, and a step that is not would have other bits.
        with (
            torch.set_grad_enabled(not self._setup.plan.uses_fsdp),
            torch.compiler.set_stance("force_eager"),
            nothing_changed(self._model, self._setup.world.device),
            parameters_kept(self._model),
            self.watching(rows),
        ):
            forward(inputs)
        if self._setup.plan.uses_fsdp:
            reshard(self._model)
        return forward(inputs)

    @contextlib.contextmanager
    def watching(self, rows: int) -> Iterator[None]:
        """Context of the first forward. Collective."""
        if self.over:
            yield
            return
        self.over = True
        plan, lines, before = self._setup.plan, dict[str, str](), copied_attributes(self._model)

        def note(name: str, parameter: nn.Parameter) -> None:
            if name not in lines:
                lines[name] = place_in(traceback.extract_stack())

        with writes_seen(self._model, note), sets_before_reads(self._model) as unread:
            yield
        self._carried.refuse_resized()
        self._carried.unread |= unread
        self._carried.written = set(lines)
        self._carried.keep_first(before)
        several = self._carried.repeated or several_forwards(plan)
        if (why := not_kept(plan, several)) is not None and lines:
            name, line = next(iter(lines.items()))
            raise TaskError(f"the parameter '{name}' is written in forward ({line}): {why}. {INSTEAD}")
        if why is None and self._setup.world.size > 1:
            named = {name: p for name, p in self._model.named_parameters() if name in lines}
            if (odd := differing(named, self._setup.world)) is not None:
                line = lines.get(odd, "on another process")
                raise TaskError(
                    f"the parameter '{odd}' is written in forward ({line}): each process writes another value, as its "
                    "samples are others. Keep it in a buffer: register_buffer"
                )
        several = several or (f"tensor={plan.tensor}" if plan.tensor > 1 else None)
        for (path, name), value in self._carried.changed(before).items() if several else ():
            if has_rows(value, rows):
                shown = f"{path}.{name}" if path else name
                raise TaskError(
                    f"forward keeps tensors in the attribute '{shown}' for the next batch: under {several} the next "
                    "forward is not that of the same rows in the next batch. Use replicate= or shard=, without "
                    "microbatches and recompute"
                )

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Context of a dry run, which changes no attribute and no parameter."""
        with attributes_kept(self._model), parameters_kept(self._model, self._carried.written):
            yield


@contextlib.contextmanager
def parameters_kept(model: nn.Module, written: set[str] | None = None) -> Iterator[None]:
    """Context in which forwards change no parameter.

    Args:
        written: the names of those that forwards write; None: they are found, which makes each operator slower.
    """
    kept: dict[str, tuple[nn.Parameter, Tensor, Tensor]] = {}

    def keep(name: str, parameter: nn.Parameter) -> None:
        kept.setdefault(name, (parameter, parameter.data, parameter.detach().clone()))

    for name, parameter in model.named_parameters() if written else ():
        if name in (written or ()):
            keep(name, parameter)
    try:
        with writes_seen(model, keep) if written is None else contextlib.nullcontext():
            yield
    finally:
        for parameter, memory, content in kept.values():
            if _memory(memory):  # FSDP2 has freed a gathered copy
                with torch.no_grad():
                    memory.copy_(content)
                parameter.data = memory


def several_forwards(plan: Plan) -> str | None:
    """Returns the key of a plan under which the model's forward runs several times a step; None: there is none."""
    for key, default in (("pipeline", 1), ("microbatches", 1), ("exact", 0)):
        if (value := getattr(plan, key)) != default:
            return f"{key}={value}"
    return "recompute" if plan.recompute else None


def not_kept(plan: Plan, several: str | None) -> str | None:
    """Returns why a plan, and what runs `several` forwards a step, do not keep what one writes to parameters."""
    if plan.uses_fsdp or plan.tensor > 1:
        keys = ("shard", "offload", "tensor")
        key = next(f"{key}={getattr(plan, key)}" for key in keys if getattr(plan, key) not in (1, "none"))
        return f"under {key} no process has all of a parameter, and the change would be lost"
    return several and f"under {several} forward runs several times a step, and so would the change"


# ---- What a forward does ------------------------------------------------------------------------------------


@contextlib.contextmanager
def writes_seen(model: nn.Module, before_write: BeforeWrite) -> Iterator[None]:
    """Context in which `before_write` is called before each write to a parameter that is not FSDP2's or DeepSpeed's."""
    with InPlaceWrites(model, before_write), AssignedData(model, before_write):
        try:
            yield
        except Exception as error:  # its message names the layer of the innermost frame
            part = error.__traceback__
            while part is not None:
                while part.tb_next is not None and part.tb_next.tb_frame.f_code.co_filename.endswith(OF_MODES):
                    part.tb_next = part.tb_next.tb_next
                part = part.tb_next
            raise


class InPlaceWrites(TorchDispatchMode):
    """Mode that sees the operators that change a parameter's memory."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True: what the user compiles, and torch.cond, is compiled under this mode too."""
        return True

    def __init__(self, model: nn.Module, before_write: BeforeWrite) -> None:
        super().__init__()
        self._model, self._before_write = model, before_write

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if Rows in types:
            return NotImplemented  # what is written to a parameter is plain
        if operator_mutates(func) and not _by_a_library():
            values = [
                args[number] if number < len(args) else kwargs.get(argument.name)
                for number, argument in enumerate(operator_arguments(func))
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            # By id too: DeepSpeed's partitioned parameters are empty.
            written = {number for leaf in tree_leaves(values) for number in (id(leaf), _memory(leaf))} - {0}
            for name, parameter in list(self._model.named_parameters()):
                if id(parameter) in written or _memory(parameter) in written:
                    self._before_write(name, parameter)
        with noting_own_kernels(func, args):
            return call_in_mode(func, args, kwargs)


torch_dynamo.leave_enabled(InPlaceWrites.__torch_dispatch__)  # torch 2.13 wraps it as its optimizers' methods

if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):  # torch 2.8 asks for a rule for each operator

    @torch.ops.higher_order.cond.py_impl(InPlaceWrites)
    def _cond(mode: InPlaceWrites, *args: Any) -> Any:
        return mode.__torch_dispatch__(torch.ops.higher_order.cond, (), args)


class AssignedData(TorchFunctionMode):
    """Mode that sees `p.data = x`, which is no operator."""

    def __init__(self, model: nn.Module, before_write: BeforeWrite) -> None:
        super().__init__()
        self._model, self._before_write = model, before_write

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == SET_DATA and isinstance(args[0], nn.Parameter) and not _by_a_library():
            for name, parameter in self._model.named_parameters():
                if parameter is args[0]:
                    self._before_write(name, parameter)
        return func(*args, **(kwargs or {}))


def _memory(leaf: Any) -> int:
    """Returns the address of a tensor's memory; 0: it has none."""
    own = local_tensor(leaf) if is_dtensor(leaf) else leaf
    if not isinstance(own, Tensor) or type(own) is Rows or own.layout != torch.strided or own.is_meta:
        return 0
    return own.untyped_storage().data_ptr()


def _by_a_library() -> bool:
    """Returns whether a library that spreads the model works now, within the innermost call of a module."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_call_impl":
        if any(part in frame.f_code.co_filename for part in SPREADERS):
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def sets_before_reads(model: nn.Module) -> Iterator[set[Place]]:
    """Context that finds the attributes which a forward sets before it reads them: nothing goes on in them.

    torch.cond traces these methods: they note nothing then, and call the module's own by super(), which can be traced.
    A tensor that a branch reads is read once more outside of the trace.
    """
    read, unread, watched = set[Place](), set[Place](), list[tuple[nn.Module, type]]()
    for path, module in own_modules(model):
        kind: Any = type(module)

        def get(self: Any, name: str, path: str = path) -> Any:
            if not torch.compiler.is_compiling() and (path, name) not in unread:
                read.add((path, name))
            return super(type(self), self).__getattribute__(name)  # type: ignore[invalid-argument]

        def put(self: Any, name: str, value: Any, path: str = path) -> None:
            if not torch.compiler.is_compiling() and (path, name) not in read:
                unread.add((path, name))
            super(type(self), self).__setattr__(name, value)  # type: ignore[invalid-argument]

        methods = {"__getattribute__": get, "__setattr__": put, "__module__": kind.__module__}
        # The attributes of a class that cannot be derived from count as read. type() would call __init_subclass__.
        with contextlib.suppress(Exception):
            module.__class__ = type(kind.__name__, (kind,), methods)
            watched.append((module, kind))
    try:
        yield unread
    finally:
        for module, kind in watched:
            module.__class__ = kind
