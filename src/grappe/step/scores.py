"""Scores: the results of an evaluation, and of training batches, merged over processes with different samples."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grappe.data.batch import Batch, Microbatch, stored_in
from grappe.data.collate import form
from grappe.domain.batches import uncut
from grappe.errors import TaskError
from grappe.errors.user_code import calls_users, sentence
from grappe.errors.user_line import at
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.private_api.torch import tree_flatten, tree_map, tree_unflatten
from grappe.private_api.torchmetrics import default_states, never_synchronise, reductions, states_were_set
from grappe.step.loss import Losses, host_copy, read
from grappe.step.observers import Observers
from grappe.step.task_contract import metrics_of
from grappe.step.whole_batch_loss import AnyLosses, WholeBatchLosses
from grappe.table import Table, Tabular
from grappe.task import Task, overrides
from grappe.words import format_number

HALF = (torch.bfloat16, torch.float16)
CHECKED_SAMPLES, CHECKED_BYTES, MOST_BYTES = 16, 1 << 18, 1 << 26
"""Samples of which a metric is computed in two ways; their bytes, but for two samples; the most bytes of two."""
BLOCK = 1024
"""Numbers for which memory is allocated at once: 8 kB."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Scores(Tabular):
    """The results of an evaluation."""

    samples: int
    """Number of evaluated samples, each counted once."""
    count: float
    """The loss's divisor: the number of samples, or of counted tokens."""
    loss: float
    metrics: Mapping[str, Number]
    """By name; `loss_NAME`: each of several losses; `training_NAME`: over the training since the evaluation before."""
    losses: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The names of several losses in `metrics`, with what each was divided by."""
    split: str = "validation"
    """The split's name; "validation (the test set)" where a task has no other validation samples."""
    checkpoint: str = ""
    """Checkpoint of the run that was evaluated, "step-000230"."""
    why: str = ""
    """The reason why this checkpoint was taken: "newest", or the newer ones that do not verify."""

    def table(self) -> Table:
        """Returns the scores as a table of one row."""
        names = {"samples": self.samples, "split": self.split, "checkpoint": self.checkpoint or None}
        return Table([{"loss": self.loss, **self.metrics, **names}])

    def __repr__(self) -> str:
        row = {name: value for name, value in self.table().rows[0].items() if value is not None}
        shown = (f"{name}={format_number(x) if isinstance(x, float) else repr(x)}" for name, x in row.items())
        return f"Scores({', '.join(shown)})"


class DeviceNumbers:
    """Numbers on a device, one of each microbatch, for which nothing waits.

    They are kept in blocks that are allocated ahead. A small tensor for each would take a piece of what the microbatch
    frees, and the next one would need memory again: 400 MB in an evaluation of 700 batches of a small transformer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: list[Tensor] = []
        self._size = 0

    def append(self, number: Tensor | float) -> None:
        """Adds a number, or a tensor of one."""
        row = self._size % BLOCK
        if row == 0:
            self._blocks.append(torch.zeros(BLOCK, dtype=torch.float64, device=self._device))
        self._blocks[-1][row] = number
        self._size += 1

    def tolist(self) -> list[float]:
        """Returns all of them; waits for the device."""
        return torch.cat(self._blocks).tolist()[: self._size] if self._blocks else []


def bytes_kept(microbatches: int, columns: int) -> int:
    """Returns the bytes of so many columns, each with a number of each microbatch."""
    return columns * -(-microbatches // BLOCK) * BLOCK * torch.float64.itemsize


def make_losses(task: Task, plan: Plan, world: World, observers: Observers | None = None) -> AnyLosses:
    """Makes the object that computes the task's loss under the plan."""
    if task.whole_batch_loss and world.domain is None:
        return WholeBatchLosses(task, plan, world, observers)
    return Losses(task, observers, stored_in(plan), world.domain)


class Scorer:
    """Accumulates losses and metrics of this process's samples."""

    def __init__(self, task: Task, plan: Plan, world: World) -> None:
        self._world = world
        self._losses, self._task = make_losses(task, plan, world), task
        self._metrics = Metrics(task, world)
        self._samples = 0
        self._totals, self._divisors = DeviceNumbers(world.device), DeviceNumbers(world.device)
        self._named: dict[str, DeviceNumbers] = {}
        self._counts: dict[str, DeviceNumbers] = {}

    @calls_users("a metric, or the loss")
    def add(self, output: Any, micro: Microbatch, batch: Batch) -> None:
        """Adds a microbatch of `batch`; padding rows do not count. Collective if the loss is of the whole batch."""
        for total, count, named, counts in self._losses.scored(output, micro, batch):
            self._totals.append(total)
            self._divisors.append(count)
            for into, several in ((self._named, named), (self._counts, counts)):
                for name, number in several.items():
                    into.setdefault(name, DeviceNumbers(self._world.device)).append(number)
        if micro.rows:
            self._samples += micro.rows
            if self._world.domain is not None and self._metrics.names:
                output, targets = uncut((output, micro.targets), "metrics")
                micro = micro._replace(targets=targets)
            self._metrics.keep_first(output, micro)
            self._metrics.update(output, micro)

    def scores(self, expected: int) -> Scores:
        """Computes the scores over all data slices, on every process. Collective.

        Raises:
            TaskError: the number of samples is not `expected`, so a sample was lost or seen twice.
        """
        self._metrics.check_cut()
        sums = {
            "samples": self._samples,
            "totals": list(zip(self._totals.tolist(), self._divisors.tolist(), strict=True)),
            "named": {name: column.tolist() for name, column in self._named.items()},
            "counts": {name: column.tolist() for name, column in self._counts.items()},
            "states": self._metrics.states(),
        }
        everyone = self._world.gather_data(sums)
        samples = sum(sums["samples"] for sums in everyone)
        if samples != expected:
            raise TaskError(f"evaluation saw {samples} samples of a dataset of {expected}: its length changed")
        # fsum rounds once, at its end, so neither the order nor the number of processes shows in the loss.
        pairs = [pair for sums in everyone for pair in sums["totals"]]
        total, count = (math.fsum(pair[part] for pair in pairs) for part in (0, 1))
        named, counts = (_summed([sums[what] for sums in everyone]) for what in ("named", "counts"))
        divisors = {f"loss_{name}": counts.get(name, count) for name in named}
        losses = {
            f"loss_{name}": self._mean(total, divisors[f"loss_{name}"], name if counts else "")
            for name, total in named.items()
        }
        loss = math.fsum(losses.values()) if counts else self._mean(total, count)
        metrics = self._metrics.computed([sums["states"] for sums in everyone if sums["samples"]])
        for name in losses.keys() & metrics.keys():
            raise TaskError(
                f"a metric and a loss are both called '{name}': give one another name{at(self._task, 'metrics')}"
            )
        return Scores(samples=samples, count=count, loss=loss, metrics={**losses, **metrics}, losses=divisors)

    def _mean(self, total: float, count: float, name: str = "") -> float:
        if count:
            return total / count
        where = at(self._task, "counts")
        if name:
            raise TaskError(f"counts() is 0 for every value of the evaluation's loss {name!r}: leave it out{where}")
        raise TaskError(f"counts() is 0 for every value of the evaluation's loss: nothing is left to divide by{where}")


def _summed(slices: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Sums all data slices' values, by name."""
    names = dict.fromkeys(name for parts in slices for name in parts)
    return {name: math.fsum(part for parts in slices for part in parts.get(name, ())) for name in names}


Number = float | list[float]


class Metrics:
    """The metrics of a task, newly made by its `method`."""

    def __init__(self, task: Task, world: World, method: str = "metrics") -> None:
        self._task = task
        self._metrics = {name: metric.to(world.device) for name, metric in metrics_of(task, method).items()}
        self.names = list(self._metrics)
        for name, metric in self._metrics.items():
            if world.size > 1 and not default_states(metric):
                raise TaskError(
                    f"the metric '{name}' has no state that processes could merge: give the metrics that it is made "
                    f"of, each by its name, or register what it counts with add_state(){at(task, 'metrics')}"
                )
            never_synchronise(metric)  # torchmetrics would merge once more, over the whole world
        self._first: list[tuple[list[Any], Any]] | None = []
        """Outputs and targets of the first samples, as leaves and nesting; None: they are not compared."""
        self._most = CHECKED_SAMPLES

    def update(self, output: Any, micro: Microbatch) -> None:
        """Adds a microbatch's samples.

        Raises:
            TaskError: a metric does not take the output and the targets.
        """
        output = self._scored(output) if self._metrics else output
        for name, metric in self._metrics.items():
            try:
                metric.update(output, micro.targets)
            except Exception as error:
                raise TaskError(
                    f"the metric '{name}' does not take what the model and the data give, an output {form(output)} "
                    f"and a target {form(micro.targets)}: {sentence(error)}. Let scored(self, output) return "
                    "what it takes, such as output.logits, output.squeeze(1) or output.argmax(1)"
                ) from error

    def _scored(self, output: Any) -> Any:
        """Returns what metrics get: sums of half precision would depend on how the samples are cut into batches."""
        return tree_map(
            lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in HALF else leaf,
            self._task.scored(output),
        )

    def keep_first(self, output: Any, micro: Microbatch) -> None:
        """Keeps a microbatch's samples for `check_cut`, until there are enough."""
        kept = self._first
        if kept is None or not self._metrics or (left := self._most - sum(len(leaves[0]) for leaves, _ in kept)) <= 0:
            return
        leaves, nesting = tree_flatten((output, micro.targets))
        odd = any(not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != micro.size for leaf in leaves)
        size = 0 if odd else sum(leaf.nbytes for leaf in leaves) / micro.size
        if odd or 2 * size > MOST_BYTES:  # logits of a language model
            self._first = None
            return
        self._most = min(self._most, max(2, int(CHECKED_BYTES / size)))
        kept.append(([leaf[: min(micro.rows, left, self._most)].clone() for leaf in leaves], nesting))

    def check_cut(self) -> None:
        """Computes each metric of this process's first samples at once and one by one, and compares.

        Nothing is checked where outputs and targets have no row for each sample, or where a metric cannot be computed
        of so few samples, or draws random numbers.

        Raises:
            TaskError: the numbers differ, so that another plan, which cuts batches elsewhere, would have other scores.
        """
        kept, self._first = self._first, None
        if not kept or any(nesting != kept[0][1] for _, nesting in kept):
            return
        several = list(zip(*(leaves for leaves, _ in kept), strict=True))
        if any(part.shape[1:] != parts[0].shape[1:] for parts in several for part in parts):
            return
        output, targets = tree_unflatten([torch.cat(parts) for parts in several], kept[0][1])
        leaves, nesting = tree_flatten((self._scored(output), targets))
        count = sum(map(len, several[0]))
        if any(not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != count for leaf in leaves):
            return
        if not all(leaf.isfinite().all() for leaf in leaves):  # torchmetrics treats a batch with NaN in another way
            return
        uneven = -(-count // 3)  # a mean of equal parts' means is the mean
        cuts = [[(0, count)], [(0, count)], [(row, row + 1) for row in range(count)], [(0, uneven), (uneven, count)]]
        for name, metric in self._metrics.items():
            values = []
            with warnings.catch_warnings(), contextlib.suppress(Exception):
                warnings.simplefilter("ignore")
                for cut in cuts:
                    fresh = copy.deepcopy(metric)
                    fresh.reset()
                    for first, end in cut:
                        part, targets = tree_unflatten([leaf[first:end] for leaf in leaves], nesting)
                        fresh.update(part, targets)
                    values.append(torch.as_tensor(_number(self._task, name, fresh.compute()), dtype=torch.float64))
            if len(values) < len(cuts) or not torch.equal(values[0].nan_to_num(), values[1].nan_to_num()):
                continue
            close = functools.partial(torch.allclose, values[0], rtol=1e-3, atol=1e-4, equal_nan=True)
            parts = next((each for each in values[2:] if not close(each)), None)
            if parts is not None:
                raise TaskError(
                    f"the metric '{name}' is {_few(values[0])} of {count} samples at once, and {_few(parts)} in "
                    "parts: another plan, which cuts batches elsewhere, would have other scores. torchmetrics takes "
                    "logits for probabilities in a batch that has none outside 0 to 1: write "
                    f"`def scored(self, output): return output.sigmoid()`, or softmax(1) of classes, in "
                    f"the task, which metrics then get{at(self._task, 'metrics')}"
                )

    def states(self) -> dict[str, dict[str, Any]]:
        """Returns each metric's state, on the CPU."""
        return tree_map(lambda leaf: leaf.cpu(), self.device_states())

    def device_states(self) -> dict[str, dict[str, Any]]:
        """Returns each metric's state, which later updates change in place."""
        return {name: dict(metric.metric_state) for name, metric in self._metrics.items()}

    def small_states(self) -> dict[str, dict[str, Any]]:
        """Returns the states of the metrics that do not keep every sample."""
        return {
            name: states
            for name, states in self.device_states().items()
            if not any(isinstance(state, list) for state in default_states(self._metrics[name]).values())
        }

    def computed(self, everyone: Sequence[Mapping[str, dict[str, Any]]]) -> dict[str, Number]:
        """Computes each metric from the `states` of all processes that had a sample.

        Raises:
            TaskError: a metric cannot be computed.
        """
        results = {}
        for name, metric in self._metrics.items():
            _merge(metric, [states[name] for states in everyone])
            try:
                value = metric.compute()
            except Exception as error:
                raise TaskError(
                    f"the metric '{name}' cannot be computed: {sentence(error, self._task, 'metrics')}"
                ) from error
            results[name] = _number(self._task, name, value)
        return results

    def computed_so_far(self, everyone: Sequence[Mapping[str, dict[str, Any]]]) -> dict[str, Number]:
        """Computes the metrics of the `small_states` for which few samples are enough; changes nothing."""
        results = {}
        for name in everyone[0]:
            metric = copy.deepcopy(self._metrics[name])
            _merge(metric, [states[name] for states in everyone])
            with contextlib.suppress(Exception):  # an evaluation reports it, if more samples do not help
                results[name] = _number(self._task, name, metric.compute())
        return results

    def reset(self) -> None:
        """Forgets all samples."""
        for metric in self._metrics.values():
            metric.reset()


@calls_users("a metric")
def _merge(metric: Any, states: list[dict[str, Any]]) -> None:
    """Merges several processes' states into the metric, each state by its own reduction.

    Does the same as torchmetrics when it synchronises (Metric._sync_dist), but over given processes.
    """
    for name, reduce in reductions(metric).items():
        values = [state[name] for state in states]
        merged: Any = (
            torch.stack(values) if isinstance(values[0], Tensor) else [item for value in values for item in value]
        )
        empty = isinstance(merged, list) and not merged
        if reduce is not None and not empty:
            merged = reduce(merged)
        if isinstance(default_states(metric)[name], list) and isinstance(merged, Tensor):
            merged = [merged]
        setattr(metric, name, tree_map(lambda leaf: leaf.to(metric.device), merged))
    states_were_set(metric)


@calls_users("a metric")
def _number(task: Task, name: str, value: Any) -> float | list[float]:
    if not isinstance(value, Tensor):
        raise TaskError(
            f"the metric '{name}' computed {form(value)}: it must be a tensor; give metrics() each number by its name"
            + at(task, "metrics")
        )
    return value.item() if value.numel() == 1 else value.tolist()


def _few(values: Tensor) -> str:
    """Writes a metric's number, or the first ones of several."""
    return ", ".join(f"{value:.4g}" for value in values.reshape(-1)[:3].tolist())


class SliceSums(NamedTuple):
    """The sums of one process; while they are copied from its device, each tensor is a HostCopy."""

    rank: int
    """Rank of its data slice."""
    samples: int
    count: Any
    sums: dict[str, Any]
    states: dict[str, dict[str, Any]]


class TrainingScores:
    """Sums that stay on this process and its device until an evaluation, so that no step waits for them.

    Args:
        metrics: whether the task's metrics are computed over training batches, where it has none for these.
    """

    def __init__(self, task: Task, world: World, *, metrics: bool) -> None:
        self._world = world
        self.of_outputs = metrics or overrides(task, "training_metrics")
        """Whether it needs the outputs of training batches."""
        method = "training_metrics" if overrides(task, "training_metrics") else "metrics"
        self._metrics = Metrics(task, world, method) if self.of_outputs else None
        self._nothing_to_show = False
        self._clear()

    def _clear(self) -> None:
        self._samples = 0
        self._count: Tensor | float = 0.0
        self._sums: dict[str, Tensor] = {}

    def add(self, output: Any, micro: Microbatch, named: Mapping[str, Tensor]) -> None:
        """Adds a training microbatch; `named` are the sums of its named losses."""
        if not (named or self._metrics) or not micro.rows:
            return
        self._samples += micro.rows
        # Losses with counts of their own are weighted so that each step's count equals its number of samples.
        self._count = self._count + (micro.weights.sum() if isinstance(micro.weights, Tensor) else micro.rows)
        for name, total in named.items():
            self._sums[name] = self._sums.get(name, 0.0) + total.double()
        if self._metrics is not None:
            with torch.no_grad():
                output, targets = tree_map(lambda leaf: _rows(leaf, micro), (output, micro.targets))
                self._metrics.update(output, micro._replace(targets=targets, padding=0))

    def copied(self, states: Callable[[Metrics], dict[str, dict[str, Any]]] = Metrics.small_states) -> SliceSums:
        """Begins to copy the sums to the host, as they are now, and the metrics' `states`: no step waits for them."""
        of_metrics = {} if self._metrics is None else states(self._metrics)
        part = SliceSums(self._world.data_rank, self._samples, self._count, self._sums, of_metrics)
        return tree_map(host_copy, part)

    def so_far(self, copied: SliceSums) -> dict[str, Number]:
        """Returns `training_NAME` of each named loss and metric, over all processes, as of `copied`. Collective.

        Metrics that keep every sample are left out.
        """
        if self._nothing_to_show:
            return {}
        scores = self._merged(copied, Metrics.computed_so_far)
        # Every process has the same: from now on all of them gather, or none.
        self._nothing_to_show = self._metrics is None and not scores
        return scores

    def joined(self, scores: Scores) -> Scores:
        """Returns an evaluation's scores with the scores of the training before it, and starts again. Collective."""
        if not (scores.losses or self._metrics):
            return scores
        averages = self._merged(self.copied(Metrics.device_states), Metrics.computed)
        self._clear()
        if self._metrics is not None:
            self._metrics.reset()
        return dataclasses.replace(scores, metrics={**scores.metrics, **averages})

    def _merged(self, copied: SliceSums, compute: Callable[..., dict[str, Number]]) -> dict[str, Number]:
        """Computes the mean of each named loss, and the metrics, over the slices that had a sample. Collective."""
        # Stages before the last have seen no output, and tensor-parallel processes the same ones.
        seen = {part.rank: part for part in self._world.gather(tree_map(read, copied)) if part.samples}
        slices = [part for _, part in sorted(seen.items())]
        count = sum(float(part.count) for part in slices) or 1.0
        scores: dict[str, Number] = {
            f"loss_{name}": math.fsum(float(part.sums.get(name, 0.0)) for part in slices) / count
            for name in dict.fromkeys(name for part in slices for name in part.sums)
        }
        if slices and self._metrics is not None:
            scores |= compute(self._metrics, [part.states for part in slices])
        return {f"training_{name}": value for name, value in scores.items()}


def _rows(leaf: Any, micro: Microbatch) -> Any:
    """Returns the samples' rows of a leaf, without its graph."""
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = leaf.detach()
    return leaf[: micro.rows] if micro.padding and leaf.dim() and len(leaf) == micro.size else leaf
