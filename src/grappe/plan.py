"""Defines Plan: the distribution of one optimizer step over processes. Frozen, pure, with one text form."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from grappe import fields
from grappe.errors import PlanError, UsageError

Rounding = Literal["fp32", "bf16", "int8"]
"""Number format of weights that are written."""
MOST_THREADS = 4096
DEGREES = ("pipeline", "replicate", "shard", "domain", "tensor")
"""Keys whose product is the number of processes."""
WHOLE_DRAWS = 4
"""Parts of a batch up to which dropout=auto has each part draw for all: a fifth to a half more time; 8 parts: twice."""
OWN_STATISTICS = frozenset({"horovod", "textbook"})
"""Engines whose batch normalisation has each process's rows."""
ONE_PROCESS = "one"
"""Name of a plan without any key on the command line."""
RECOMPUTED = re.compile(r"(full|selective|host)(?::(\d+)(?:-(\d+))?)?")
"""A part of recompute: full, selective or host, or one of them for a unit or a range of units: selective:2-5."""
MEMORY = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([MGT])B")
UNITS = {"M": 10**6, "G": 10**9, "T": 10**12}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The distribution of one optimizer step over pipeline x replicate x shard x domain x tensor processes.

    `grappe engines` shows the keys, with the docstring under each key as its help, and the engines that support it.
    """

    engine: str = "native"
    """The library that trains: native, deepspeed, horovod, lightning or textbook."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device: auto, cpu or cuda."""
    backend: Literal["auto", "gloo", "nccl", "mpi"] = "auto"
    """Communication library: auto, gloo, nccl or mpi."""
    replicate: int = 1
    """Data parallelism: copies of the model, each with its slice of the batch."""
    shard: int = 1
    """Sharded data parallelism: processes share parameters, gradients and optimizer state."""
    zero: Literal[1, 2, 3] = 3
    """ZeRO stage of shard: 1 splits optimizer state, 2 gradients too, 3 parameters too."""
    pipeline: int = 1
    """Pipeline parallelism: processes that hold the model's stages, one after the other."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Pipeline schedule: gpipe, 1f1b, interleaved or zero_bubble."""
    stages: int | None = None
    """Pipeline stages of each process; auto: 2 under schedule=interleaved, else 1."""
    tensor: int = 1
    """Tensor parallelism: processes that split the matrices, as the task's tensor_plan says."""
    domain: int = 1
    """Domain (or context) parallelism: processes that each hold a part of every sample: of its height, its length."""
    cut: Literal["sample", "batch"] = "sample"
    """Tensors that domain cuts: each sample's, or the batch's by rows: then functions and the loss see all."""
    microbatches: int = 1
    """Microbatches of a process's slice: for gradient accumulation and for pipelines."""
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp64"] = "fp32"
    """Precision: fp32, tf32, or mixed: bf16, fp16 (with loss scaling); fp64: weights, data and sums in double."""
    batchnorm: Literal["auto", "local", "sync"] = "auto"
    """Batch normalisation's statistics: a process's (local) or the batch's (sync); auto: sync where it can be."""
    dropout: Literal["auto", "whole", "local"] = "auto"
    """Dropout and noise: one process's (whole), a process's own (local), or whole for up to 4 slices x microbatches."""
    channels_last: bool = False
    """Memory layout NHWC for images."""
    recompute: bool | str = False
    """Activation checkpointing: run units again in backward; selective: not matrix products; host: keep all there."""
    memory: str = "none"
    """Bytes that torch may allocate on a process's device, 14GB or auto: recomputes what costs least so as to fit."""
    compile: bool = False
    """torch.compile on each unit."""
    cuda_graphs: bool = False
    """CUDA graphs: with compile, replay each unit's kernels in one launch; for steps of many small kernels."""
    offload: str = "none"
    """Offload of parameters and optimizer state: cpu (host memory) or nvme:FOLDER (a disk)."""
    config: str = "none"
    """A file of the engine's own settings, DeepSpeed's ds_config.json; it may not contradict the plan."""
    per_device: int = 1
    """Processes that share a GPU."""
    exact: int = 0
    """Fixed pieces of each batch, for the same bits on any number of processes; 0: off."""
    check: int = 0
    """Steps after which another process computes a piece of exact's again, to compare every bit; 0: off."""
    threads: int | None = None
    """CPU threads of each process; auto: the cores, divided among the node's processes."""
    workers: int | None = None
    """Data workers of each process; auto: as measured while it trains; 0: the process loads its own data."""
    loading: Literal["auto", "threads", "processes"] = "auto"
    """Kind of data workers: threads, processes, or auto: whichever is faster."""
    prefetch: int = 2
    """Batches that each worker process has ready, or all threads together: more where loading times vary."""
    validation_batch: int | None = None
    """Samples in each batch of an evaluation, over all processes; auto: twice a microbatch's."""

    def __post_init__(self) -> None:
        at_least = dict.fromkeys((*DEGREES, "microbatches", "per_device", "stages", "prefetch", "validation_batch"), 1)
        for name, least in {**at_least, "threads": 1, "workers": 0, "exact": 0, "check": 0}.items():
            value = getattr(self, name)
            most = MOST_THREADS if name in ("threads", "workers") else value
            if value is not None and not least <= value <= most:
                raise PlanError(
                    f"{name}={value}: it must be at least {least}" + f", and at most {most}" * (value > most)
                )
        if self.offload not in ("none", "cpu") and not self.offload.startswith("nvme:"):
            raise PlanError(f"offload={self.offload}: it must be none, cpu or nvme:FOLDER")
        if self.offload == "nvme:":
            raise PlanError(
                "offload=nvme: names no folder. If a variable is empty here and not on the node, write it in single "
                "quotes: --plan '…,offload=nvme:$SLURM_TMPDIR'"
            )
        self._check_recompute()
        if self.zero != 3 and self.shard == 1:
            raise PlanError(f"zero={self.zero} needs sharded processes: add shard=2 or more")
        if self.exact & (self.exact - 1) or (self.exact and self.exact % self.data_parallel):
            most = min(self.exact, self.data_parallel)
            raise PlanError(
                f"exact={self.exact} with {self.data_parallel} slices: pieces are summed in a binary tree, whole "
                f"subtrees by each process, so exact must be a power of two (such as 8), and the processes one of its "
                f"divisors: for example replicate={1 << most.bit_length() - 1}"
            )
        if self.check and not self.exact:
            raise PlanError(f"check={self.check} compares the pieces of exact to the bit: add for example exact=8")
        if self.cut == "batch" and self.domain == 1:
            raise PlanError("cut=batch is what domain cuts: write domain=2,cut=batch, or more processes")
        if self.schedule != "1f1b" and self.pipeline == 1:
            raise PlanError(f"schedule={self.schedule} is a pipeline's: add pipeline=2, or more")
        if self.stages is not None and self.pipeline == 1:
            raise PlanError(f"stages={self.stages} are a pipeline's: add pipeline=2, or more")

    def _check_recompute(self) -> None:
        if isinstance(self.recompute, str) and not all(map(RECOMPUTED.fullmatch, self.recompute.split("+"))):
            raise PlanError(
                f"recompute={self.recompute}: write recompute, recompute=selective or recompute=host, or units of "
                "each, numbered from 0: recompute=full:0-3+selective:4-7"
            )
        if self.compile and re.search("selective|host", str(self.recompute)):
            raise PlanError(f"recompute={self.recompute} with compile is not supported: use recompute, without a value")
        if "host" in str(self.recompute) and (self.engine != "native" or self.tensor * self.domain > 1):
            raise PlanError(
                f"recompute={self.recompute} keeps activations on the host, which takes engine=native without tensor "
                "and domain: leave those out, or use recompute=full"
            )
        if self.memory not in ("none", "auto") and not MEMORY.fullmatch(self.memory):
            raise PlanError(f"memory={self.memory}: write a number of bytes, as in 14GB or 900MB, or auto")
        if self.memory != "none" and self.recompute:
            raise PlanError(f"memory={self.memory} chooses what to recompute: leave recompute={self.recompute} out")

    @property
    def processes(self) -> int:
        """Returns the number of processes."""
        return self.pipeline * self.replicate * self.shard * self.domain * self.tensor

    @property
    def data_parallel(self) -> int:
        """Returns the number of data slices of each global batch."""
        return self.replicate * self.shard

    @property
    def synchronises(self) -> bool:
        """Returns whether batch normalisation has the statistics of all processes' rows."""
        able = self.engine not in OWN_STATISTICS and self.tensor * self.domain == 1
        unasked = self.batchnorm == "auto" and able and not (self.exact or self.cuda_graphs)
        return self.data_parallel > 1 and (self.batchnorm == "sync" or unasked)

    @property
    def statistics(self) -> str:
        """Returns the rows whose statistics batch normalisation has, in words; "": the whole batch's."""
        if self.exact:
            return f"each of {self.exact} pieces of a batch"
        whose = "each process" if self.data_parallel > 1 and not self.synchronises else ""
        if self.microbatches > 1:
            return f"each microbatch of {whose}" if whose else "each microbatch"
        return whose

    @property
    def parts(self) -> int:
        """Returns the number of parts in which a step is computed: forwards see parts of its batch, or of the model."""
        spread = self.data_parallel * self.pipeline * self.tensor * self.domain
        return spread * self.microbatches * max(1, self.exact)

    @property
    def checked(self) -> float:
        """Returns what check= adds to a step's computing, by count: the share of the pieces computed a second time."""
        return self.data_parallel / (self.check * self.exact) if self.check and self.data_parallel > 1 else 0.0

    @functools.cached_property
    def draws_whole_batches(self) -> bool:
        """Returns whether a model's random numbers are those that one process draws for the whole batch."""
        parts = self.data_parallel * self.microbatches
        if self.exact or self.compile or parts * self.pipeline * self.tensor == 1:
            return False
        return self.dropout == "whole" or (self.dropout == "auto" and parts <= WHOLE_DRAWS)

    @property
    def uses_fsdp(self) -> bool:
        """Returns whether the plan needs fully_shard: to shard, to replicate with tensor parallelism, or to offload."""
        return self.shard > 1 or self.offload != "none" or (self.replicate > 1 and self.tensor > 1)

    @property
    def uses_ddp(self) -> bool:
        """Returns whether DDP sums the gradients: fully_shard, pipelines and exact sums do that themselves."""
        copies = self.data_parallel * self.domain
        return copies > 1 and not self.uses_fsdp and self.pipeline == 1 and not self.exact

    @property
    def memory_limit(self) -> int | None:
        """Returns the bytes of `memory`; None: none, or auto."""
        size = MEMORY.fullmatch(self.memory)
        return None if size is None else int(float(size[1]) * UNITS[size[2]])

    def recomputed(self, units: int) -> list[str]:
        """Returns what each of a model's units recomputes: "full", "selective", "host", or "" for nothing.

        Raises:
            PlanError: `recompute` names a unit that the model does not have.
        """
        levels = [""] * units
        for part in (str(self.recompute) if self.recompute is not True else "full").split("+"):
            match = RECOMPUTED.fullmatch(part)
            if match is None:
                continue  # False
            level, first, last = match.groups()
            chosen = range(units) if first is None else range(int(first), int(last or first) + 1)
            if first is not None and (not chosen or chosen[-1] >= units):
                raise PlanError(f"recompute={self.recompute}: {part} names no units of this model, which has {units}")
            for number in chosen:
                levels[number] = level
        return levels

    @property
    def saves_memory(self) -> bool:
        """Returns whether a key was chosen to save memory."""
        return self.shard > 1 or self.offload != "none"

    def changed_keys(self) -> frozenset[str]:
        """Returns the names of the keys that differ from their default."""
        return frozenset(field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default)

    def check_fits(self, processes: int) -> None:
        """Raises PlanError if the plan's product is not the world size."""
        if self.processes == processes:
            return
        names = [name for name in DEGREES if getattr(self, name) > 1]
        product = " x ".join(f"{name}={getattr(self, name)}" for name in names) or "one process"
        name = names[-1] if names else "replicate"
        rest = self.processes // getattr(self, name)
        remedy = f"ask for {self.processes}, or choose degrees whose product is {processes}"
        if processes % rest == 0 and processes > 1:
            remedy = f"use {name}={processes // rest}, or ask for {self.processes}"
        raise PlanError(
            f"plan needs {self.processes} process{'es' if self.processes > 1 else ''} ({product}), "
            f"this job has {processes}: {remedy}"
        )

    def __str__(self) -> str:
        """Writes the plan as text, without defaults: `replicate=2,precision=bf16`; empty for one process."""
        changed = self.changed_keys()
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name in changed}
        return ",".join(name if value is True else f"{name}={value}" for name, value in values.items())

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Parses a plan's text, `"replicate=2,precision=bf16"`; "one" and "" are one plain process.

        Raises:
            PlanError: an unknown key, a value of the wrong type, a key given twice, or a contradiction.
        """
        parts = [] if text.strip() == ONE_PROCESS else [part for part in text.split(",") if part.strip()]
        for part in parts:
            name = part.strip().lower()
            if (answer := NO_KEYS.get(name, NO_KEYS.get(name.partition("=")[0]))) is not None:
                raise PlanError(f"plan: {part.strip()}: {answer}")
            if (instead := strategy_in_grappe(part)) is not None:
                raise PlanError(f"plan: {part.strip()} is a strategy of Lightning's: {instead}")
        try:
            return cls(**fields.parse(cls, fields.split(parts), "plan"))
        except PlanError:
            raise
        except UsageError as error:
            raise PlanError(str(error)) from None


def recompute_of(levels: Sequence[str]) -> bool | str:
    """Returns the value of `recompute` by which each unit recomputes what `levels` says (see `Plan.recomputed`)."""
    if len(set(levels)) == 1:
        return {"": False, "full": True}.get(levels[0], levels[0])
    parts, first = [], 0
    for level, same in itertools.groupby(levels):
        last = first + len(list(same)) - 1
        parts += [f"{level}:{first}-{last}" if last > first else f"{level}:{first}"] * bool(level)
        first = last + 1
    return "+".join(parts)


AnyPlan = Plan | str | Mapping[str, object]
"""A plan, its text ("replicate=2,recompute"), or its keys ({"replicate": 2, "recompute": True})."""


def as_plan(plan: AnyPlan) -> Plan:
    """Returns the Plan of any of its forms.

    Raises:
        PlanError: it is none of them, or a key or value is wrong.
    """
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, Mapping):
        return Plan.parse(",".join(f"{key}={fields.text_of(value)}" for key, value in plan.items()))
    if isinstance(plan, str):
        return Plan.parse(plan)
    raise PlanError(f'{plan!r} is not a plan: write "replicate=2", or {{"replicate": 2}}')


NO_KEYS = {
    **dict.fromkeys(
        ("async", "asynchronous", "local_sgd", "diloco"),
        "every update waits for all processes, or a plan would learn something else: replicate=N; asynchronous "
        "updates, local SGD and DiLoCo are not there",
    ),
    **dict.fromkeys(
        ("precision=int8", "precision=int4"),
        "train with precision=bf16 or fp16; grappe export RUN --out FOLDER --weights int8 writes a trained model in 8 "
        "bits; 4 bits are not there",
    ),
    **dict.fromkeys(
        ("batch", "batch_size", "epochs", "lr", "seed"),
        "this is a field of the task, outside of --plan: batch_size=…, epochs=…, lr=…",
    ),
    "interop": "threads=N are those within an operator; for those between operators, which torch.jit.fork starts, "
    "write torch.set_num_interop_threads(N) at the top of the task's file",
    "offload=nvme:local_scratch": "that is a folder of this name where grappe starts; for the node's own disk write "
    "offload=nvme:$SLURM_TMPDIR, in single quotes",
}
"""Words of other programs' pages that are no keys of a plan, and what to write in their place."""
STRATEGIES = {
    "auto": "leave it out: grappe starts the processes that the plan needs",
    "ddp": "use replicate=2 (the number of processes), with engine=lightning for its Trainer",
    "ddp2": "it is gone from Lightning; use replicate=N",
    "ddp_spawn": "use replicate=N: grappe starts the processes",
    "ddp_fork": "use replicate=N: grappe starts the processes",
    "ddp_notebook": "use replicate=N: it works in notebooks, too",
    "ddp_find_unused_parameters_true": "use replicate=N: it finds unused parameters itself",
    "ddp_find_unused_parameters_false": "use replicate=N: it finds unused parameters itself",
    "ddp_sharded": "FairScale's optimizer sharding is shard=N,zero=1 here",
    "dp": "one process for all GPUs is slower and gone from Lightning; use replicate=N",
    "fairscale": "FairScale's sharding is shard=N here, with zero=1 to 3",
    "fsdp": "use shard=N (FSDP2; zero=1 to 3), and add replicate=M for hybrid sharding",
    "fsdp_cpu_offload": "use shard=N,offload=cpu",
    "fsdp_native": "use shard=N",
    "modelparallelstrategy": "use shard=N, tensor=M",
    "deepspeed": "use engine=deepspeed,shard=N,zero=2 (zero=3 by default)",
    "deepspeed_stage_1": "use engine=deepspeed,shard=N,zero=1",
    "deepspeed_stage_1_offload": "use engine=deepspeed,shard=N,zero=1,offload=cpu",
    "deepspeed_stage_2": "use engine=deepspeed,shard=N,zero=2",
    "deepspeed_stage_2_offload": "use engine=deepspeed,shard=N,zero=2,offload=cpu",
    "deepspeed_stage_3": "use engine=deepspeed,shard=N",
    "deepspeed_stage_3_offload": "use engine=deepspeed,shard=N,offload=cpu, or engine=lightning for its Trainer",
    "deepspeed_stage_3_offload_nvme": "use engine=deepspeed,shard=N,offload=nvme:FOLDER",
    "horovod": "it is gone from Lightning; use engine=horovod,replicate=N",
    "bagua": "it is gone from Lightning; use replicate=N",
    "colossalai": "it is gone from Lightning; use shard=N",
    "single_device": "leave it out: one process is the default",
}

FAMILIES = ("ddp_spawn", "ddp_fork", "ddp_notebook", "ddp", "fsdp", "deepspeed")
"""Beginnings of names with further words, as in ddp_find_unused_parameters_false."""


def strategy_in_grappe(part: str) -> str | None:
    """Returns what takes a strategy's place in a plan; None for what is no strategy's name.

    Args:
        part: a part of a plan's text: `ddp`, or `strategy=ddp`.
    """
    key, equals, value = part.strip().lower().partition("=")
    if equals and key != "strategy":
        return None
    name = value if equals else key
    family = next((prefix for prefix in FAMILIES if name.startswith(f"{prefix}_")), "")
    remedy = STRATEGIES.get(name, STRATEGIES.get(family))
    if remedy is None and equals:
        return "the plan defines how a step is distributed, as in replicate=2 or shard=2 (see: grappe engines)"
    return remedy
