"""Writes checkpoints in the background, and commits each when the files of all processes are on disk.

Each process writes one file and then that file's fingerprint. Process 0 waits for all the
fingerprints and commits. Nothing else is sent between processes, so nothing disturbs the steps under way.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grappe.checkpoint import tensor_file
from grappe.checkpoint.commit import Fingerprint, Origin, commit, read_json, strangers, write_json, write_new
from grappe.checkpoint.format import STATE, Retention, step_folder
from grappe.checkpoint.tensor_file import Piece
from grappe.errors import ComputedWrongly, RunError
from grappe.launch import files
from grappe.launch.files import IN_CHECKPOINT, IN_PART
from grappe.launch.terminal import complain
from grappe.launch.world import World
from grappe.private_api.torch import is_dtensor, local_shape_and_offset
from grappe.profiling import memory
from grappe.words import host_name

POLL_SECONDS = 0.01
SAMPLES = "samples"  # of the values that are saved: how many samples were seen
Stream = Callable[[], Iterator[tuple[str, Tensor]]]


class Saver:
    """Saves to `folder`; all methods but `close` are collective.

    Args:
        token: identifies this start of the run, so that files of an earlier, dead start are never used.
        may_commit: called before each commit; raises RunError when another process writes this run now.
        run: the run's id, which checkpoints carry.
        bits: makes a number of a tensor's bits, by which copies are compared with what was copied; None: they are not.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        token: str,
        keep: Retention,
        may_commit: Callable[[], None],
        run: str = "",
        bits: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._folder, self._world, self._token, self._run, self._bits = folder, world, token, run, bits
        self._keep, self._may_commit = keep, may_commit
        self._snapshots = Snapshots()
        self._first: int | None = None
        """The step of the first save."""
        self._said = False
        """Whether the log says why the training waits for its checkpoints."""
        self._saving = False
        """Whether a save's end is not known yet."""
        self._thread: threading.Thread | None = None
        """The thread that writes; None also where it could not be started."""
        self._beside: Path | None = None
        self._error: str | None = None
        self._altered = ""
        """This node's name if its memory altered a copy."""
        self._held: tuple[int, list[Piece], dict[str, Any]] | None = None
        """A copied state that is not being written."""
        self._abandoned = threading.Event()
        self._written = threading.Event()
        self._written.set()

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        values: Mapping[str, Any],
        stream: Stream | None = None,
    ) -> str | None:
        """Copies the state and returns; a thread writes the copy. What is held is written before.

        With `stream`, which yields the values of `tensors`, the values are written as they arrive, and only the commit
        happens in the background: together the values do not fit into memory.

        Returns:
            The error of the save before this one, on any process; None: that save is committed.
        """
        before = self.write_held()
        uncopied, streamed, copied = self._pieces(tensors, own), None, True
        temporary = self._prepare(step)
        pieces = uncopied
        if self._first is None:
            self._first = step
        if stream is None:
            # The first step makes the optimizer's state, so that only the second one needs all that a step needs.
            peak_known, processes = step >= self._first + 2, self._world.process.local_size
            pieces, copied = self._snapshots.take(uncopied, processes, peak_known=peak_known)
        else:
            streamed = self._stream(temporary, uncopied, own, stream)
        if not self._begin(step, pieces, values, streamed, uncopied):
            copied = False
        if not copied:  # no memory for copies: the training must not go on before the tensors are written
            self._written.wait()
            if not self._said and self._world.rank == 0:
                complain(
                    "a checkpoint is written without a copy in memory, which has no room: the training waits for it"
                )
                self._said = True
        return before

    def hold(
        self, step: int, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], values: Mapping[str, Any]
    ) -> str | None:
        """Copies the state, which the next `save` writes first; where there is no room, `save` does it now.

        Returns:
            As `save`.
        """
        before = self.wait()
        pieces, copied = self._snapshots.take(self._pieces(tensors, own), self._world.process.local_size)
        if not all(self._world.gather(copied)):
            return self.save(step, tensors, own, values) or before
        self._held = (step, pieces, dict(values))
        return before

    def write_held(self) -> str | None:
        """Writes what is held, after the running save; waits for both, and returns an error of theirs."""
        before = self.wait()
        if self._held is None:
            return before
        (step, pieces, values), self._held = self._held, None
        self._prepare(step)
        self._begin(step, pieces, values)
        return self.wait() or before

    def forget(self) -> None:
        """Drops what is held."""
        self._held = None

    def _pieces(self, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[Piece]:
        pieces, bits = pieces_to_write(tensors, own, self._world), self._bits
        return [piece if bits is None else piece._replace(bits=int(bits(piece.data))) for piece in pieces]

    def _prepare(self, step: int) -> Path:
        self._written.clear()
        self._abandoned.clear()
        self._beside = self._folder / f".step-{step:06d}.{self._token}"
        return self._beside

    def _begin(
        self,
        step: int,
        pieces: list[Piece],
        values: Mapping[str, Any],
        streamed: Callable[[], None] | None = None,
        uncopied: list[Piece] | None = None,
    ) -> bool:
        """Starts to write; returns False if that is done already, since there is no memory for a thread."""
        self._saving = True
        try:
            arguments = (step, pieces, dict(values), streamed)
            thread = threading.Thread(target=self._write, args=arguments, name="grappe-save", daemon=True)
            thread.start()
            self._thread = thread
        except RuntimeError:
            if uncopied is not None:
                self._snapshots.clear()
            self._write(step, uncopied or pieces, dict(values), streamed)
            return False
        return True

    def wait(self) -> str | None:
        """Waits for the running save, if there is one; returns that save's error, on any process.

        Raises:
            ComputedWrongly: a process's memory altered its copy.
        """
        if not self._saving:
            return None
        self._saving = False
        self._written.wait()
        rows = self._world.gather((self._error, self._altered))
        problems = [problem for problem, _ in rows if problem]
        if problems:
            self._abandoned.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem = self._world.share(problems[0] if problems else self._error)
        self._error = None
        if problem is not None and self._beside is not None and self._world.rank == 0:
            # One that was slow may have written its part after another had failed and tidied up.
            with contextlib.suppress(OSError, RunError):
                self._tidy(self._beside)
        if nodes := {node: problem for problem, node in rows if problem and node}:
            raise ComputedWrongly("; ".join(nodes.values()) + ". The checkpoint before it is whole", nodes)
        return problem

    def _stream(
        self, temporary: Path, pieces: list[Piece], own: Mapping[str, Tensor], stream: Stream
    ) -> Callable[[], None]:
        """Writes this process's part now; returns a function for the thread, which raises the write's error."""
        values = stream()
        names = {piece.name for piece in pieces}
        chosen = (value for name, value in values if name in names)
        try:
            self._write_mine(temporary, pieces, itertools.chain(chosen, own.values()))
            error = None
        except Exception as problem:
            error = problem
        for _ in values:  # the others wait for this process at each tensor, even if its file failed
            pass

        def again() -> None:
            if error is not None:
                raise error

        return again

    def _write(
        self, step: int, pieces: list[Piece], values: dict[str, Any], streamed: Callable[[], None] | None = None
    ) -> None:
        temporary = self._folder / f".step-{step:06d}.{self._token}"
        try:
            with self._noting(step, temporary):
                if streamed is None:
                    self._snapshots.wait()
                    self._write_mine(temporary, pieces)
                else:
                    streamed()
        finally:
            self._written.set()  # after the note: process 0 waits in vain for unreported errors
        if self._world.rank == 0 and self._error is None:
            with self._noting(step, temporary):
                self._commit(temporary, step, values)

    @contextlib.contextmanager
    def _noting(self, step: int, temporary: Path) -> Iterator[None]:
        """Context that records an exception: in a thread it would be lost, and the save would count as committed."""
        try:
            yield
        except Exception as error:
            kind = "" if isinstance(error, OSError | RunError | ComputedWrongly) else f"{type(error).__name__}: "
            self._error = f"step {step} could not be saved: {kind}{error}"
            with contextlib.suppress(OSError, RunError):
                self._tidy(temporary)

    def _tidy(self, temporary: Path) -> None:
        """Removes a failed save's files; only process 0 removes the folder, or others would report its absence."""
        own_files = re.compile(rf"\.?rank-{self._world.rank}\.safetensors.*", re.DOTALL)
        if self._world.rank == 0 and not strangers(temporary):
            files.remove_tree(temporary, IN_PART)
            return
        for name in files.names(temporary, IN_PART):
            if own_files.fullmatch(name):
                files.remove(temporary / name, IN_CHECKPOINT)

    def _write_mine(self, temporary: Path, pieces: list[Piece], values: Iterable[Tensor] | None = None) -> None:
        files.make_folder(temporary, IN_PART)  # no parents: a run that was removed must not come back in part
        name = f"rank-{self._world.rank}.safetensors"
        print_of = tensor_file.write(temporary / name, pieces, values)
        for piece in pieces:  # afterwards: while it is written, a copy may change as well
            if piece.bits is not None and self._bits is not None and int(self._bits(piece.data)) != piece.bits:
                self._altered, process = host_name(), f"process {self._world.rank} (node {host_name()})"
                raise ComputedWrongly(f"the copy of {piece.name} in the memory of {process} has other bits")
        write_json(temporary / f"{name}.done", print_of, IN_CHECKPOINT)

    def _commit(self, temporary: Path, step: int, values: dict[str, Any]) -> None:
        fingerprints: dict[str, Fingerprint] = {}
        for rank in range(self._world.size):
            name = f"rank-{rank}.safetensors"
            done = temporary / f"{name}.done"
            while not files.kind(done):
                if self._abandoned.wait(POLL_SECONDS):
                    raise RunError("another process could not write its part")
                if not done.parent.is_dir():  # nobody would ever write it
                    raise RunError(f"{done.parent} was removed: No such file or directory")
            fingerprints[name] = read_json(done, IN_CHECKPOINT)
        for name in fingerprints:
            files.remove(temporary / f"{name}.done", IN_CHECKPOINT)
        state = json.dumps({"step": step, **values}, indent=1)
        fingerprints[STATE] = write_new(temporary / STATE, state.encode())
        self._may_commit()
        origin = Origin(step=step, run=self._run, samples=values.get(SAMPLES, 0))
        commit(temporary, step_folder(self._folder, step), fingerprints, origin)
        self._keep.clean(self._folder, step)

    def close(self) -> None:
        """Abandons a running save: the checkpoint before it stays the newest."""
        self._abandoned.set()
        if self._thread is not None:
            self._thread.join(timeout=5)


class Snapshots:
    """Copies pieces into buffers that are kept from one save to the next: new memory costs more than the copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._device: DeviceCopies | None = None

    @torch.no_grad()
    def take(self, pieces: Iterable[Piece], processes: int = 1, *, peak_known: bool = True) -> tuple[list[Piece], bool]:
        """Returns the pieces on the host, and whether they are copies; overwrites the result of the previous call.

        Without memory for the copies beyond a step's, pieces on the host are returned uncopied. Pieces of a GPU may
        still be in transfer, if the GPU has room for a copy: call `wait` before they are read.

        Args:
            processes: the number of processes on this node that take theirs.
            peak_known: whether this process has already taken the memory that a step needs.
        """
        originals = list(pieces)
        on_gpu = [piece for piece in originals if piece.data.is_cuda]
        missing = sum(piece.data.nbytes for piece in originals if not self._kept(piece))
        if missing and not on_gpu and not memory.has_room(missing, processes, peak_known=peak_known):
            return self._without(originals)
        try:
            taken = [piece._replace(data=self._buffer(piece)) for piece in originals]
            on_its_own_stream = False
            if on_gpu and peak_known and gpu_has_room(sum(piece.data.nbytes for piece in on_gpu), processes):
                self._device = self._device or DeviceCopies()
                on_its_own_stream = self._device.start(
                    [piece.data for piece in on_gpu], [self._buffer(piece) for piece in on_gpu]
                )
            for piece in originals:
                if not (on_its_own_stream and piece.data.is_cuda):
                    self._buffer(piece).copy_(piece.data, non_blocking=True)
        except (RuntimeError, MemoryError):
            if on_gpu:
                raise
            return self._without(originals)
        if on_gpu and not on_its_own_stream:
            torch.cuda.synchronize()
        return taken, True

    def wait(self) -> None:
        """Waits until the pieces of the last call are on the host; from any thread."""
        if self._device is not None:
            self._device.wait()

    def clear(self) -> None:
        """Frees the copies' memory."""
        self._buffers.clear()

    def _without(self, originals: list[Piece]) -> tuple[list[Piece], bool]:
        self.clear()  # all of it: what the process needs to write must have room as well
        return originals, False

    def _buffer(self, piece: Piece) -> Tensor:
        if not self._kept(piece):
            # Contiguous, whatever the memory format of the tensor: that is how it is written.
            self._buffers[piece.name] = torch.empty(
                piece.data.shape, dtype=piece.data.dtype, pin_memory=piece.data.is_cuda
            )
        return self._buffers[piece.name]

    def _kept(self, piece: Piece) -> bool:
        kept = self._buffers.get(piece.name)
        return kept is not None and kept.shape == piece.data.shape and kept.dtype == piece.data.dtype


def pieces_to_write(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], world: World) -> Iterator[Piece]:
    """Yields this process's pieces: its shard of sharded tensors, its turn of replicated ones, and all local tensors.

    A pure function of names and shapes, so that processes agree without communication: a tensor that several
    processes have alike is written by the process with the fewest bytes to write so far.
    """
    loads: dict[int, list[int]] = {}
    for name, tensor in tensors.items():
        copies, index = _copies(tensor, world)
        writer = next_writer(loads.setdefault(copies, [0] * copies), tensor.numel() * tensor.element_size())
        if writer == index and (piece := _piece(name, tensor)) is not None:
            yield piece
    for name, tensor in own.items():
        yield Piece.complete(name, tensor)


def next_writer(loads: list[int], size: int) -> int:
    """Returns the process with the fewest bytes to write so far; `size` bytes more are its."""
    writer = loads.index(min(loads))
    loads[writer] += size + 1
    return writer


def _copies(tensor: Tensor, world: World) -> tuple[int, int]:
    """Returns the number of processes that hold the same part of the tensor, and this process's number among them."""
    split = {"pipeline"}  # no two stages hold the same tensor
    if is_dtensor(tensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        split |= {n for n, placed in zip(names, tensor.placements, strict=True) if not placed.is_replicate()}
    copies, index = 1, 0
    for axis, (position, degree) in world.coordinates().items():
        if axis not in split:
            copies, index = copies * degree, index * degree + position
    return copies, index


def _piece(name: str, tensor: Tensor) -> Piece | None:
    if not is_dtensor(tensor):
        return Piece.complete(name, tensor)
    local = tensor.to_local().detach()
    if local.numel() == 0:
        # Nobody writes an empty part of a tensor; an empty tensor is still a tensor, and one process writes it.
        places = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
        first = all(place == 0 for place, placed in places if not placed.is_replicate())
        return Piece.complete(name, local.view(tensor.shape)) if first and tensor.numel() == 0 else None
    shape, offset = local_shape_and_offset(tensor)
    assert tuple(local.shape) == shape, (name, local.shape, shape)
    return Piece(name, local, tuple(tensor.shape), offset)


SHARE = 0.8  # of the memory that a step leaves free: the allocator cannot use all of it


class DeviceCopies:
    """Copies of tensors on a GPU, which reach the host on a stream of their own.

    The copy within the GPU is made on the stream that computes, before anything changes the tensors: 40 GB in 20 ms by
    the data sheet of an H200 (4.8 TB/s), where PCIe takes a second.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._arrived: torch.cuda.Event | None = None

    def start(self, tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> bool:
        """Copies tensors into page-locked buffers; the host waits for nothing. Returns False without memory for it."""
        try:
            copies = [
                torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor) for tensor in tensors
            ]
        except torch.OutOfMemoryError:
            return False
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for tensor, buffer in zip(copies, buffers, strict=True):
                buffer.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)  # its memory is not given away before it has been read
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        return True

    def wait(self) -> None:
        """Waits until the last copies are on the host; from any thread."""
        if self._arrived is not None:
            self._arrived.synchronize()


def gpu_has_room(size: int, processes: int) -> bool:
    """Returns whether the GPU holds `size` bytes more than the most that this process has had there.

    Args:
        processes: the number of processes on this node; where they share GPUs, none knows what the others will take.
    """
    if processes > torch.cuda.device_count():
        return False
    free, _ = torch.cuda.mem_get_info()
    left = free + torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated()
    return size <= SHARE * left
