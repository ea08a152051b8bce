"""Distributes a plan over a site's nodes: nodes, processes, cores and memory, or the reason why it does not fit."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import math
import re
from collections.abc import Mapping

from grappe.errors import GrappeError, PlanError, UsageError, nearest
from grappe.fields import NumberRange
from grappe.plan import Plan
from grappe.sites.sbatch import JobOptions
from grappe.sites.schema import GPUS, Node, Queue, Site


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The resources of a job; of its fewest nodes, if it takes a range of them."""

    nodes: int
    processes: int
    """Processes on each node."""
    gpus: int
    """GPUs on each node; 0: none."""
    cores: int
    """Cores of each process."""
    memory_gb: float | None
    """Memory of each node in GB; None: not requested."""
    seconds: int
    queue: Queue | None
    sizes: Mapping[int, Plan] = dataclasses.field(default_factory=dict)
    """The plan for each number of nodes, if the job takes as many as Slurm has, or has spares."""
    spare: int = 0
    """Nodes more than are used."""

    @property
    def most_nodes(self) -> int:
        """Returns the number of nodes that the job takes at most, spares included."""
        return max(self.sizes, default=self.nodes) + self.spare


def charge(site: Site, layout: Layout) -> float | None:
    """Computes a job's charge in the site's unit, if it uses all of its time; None: the site's file has no table.

    It is that of the dearest part of what the job holds, times its time. Whole nodes are held with all that they have.
    Of the Alliance it is max(ΣRGU, cores / cores per RGU, GB / GB per RGU) x time ("Allocations and compute
    scheduling", 2026-09-27); of CINECA max(cores, 8 x GPUs) core-hours; of Isambard-AI the largest share of a node; of
    CSC 200 billing units and of SURF 128 SBU for a GPU's hour.
    """
    table, node = site.charge, site.node
    if table is None or node is None:
        return None
    cores, memory = layout.processes * layout.cores, layout.memory_gb or 0.0
    if layout.gpus and _gives_whole(site, layout.queue) and layout.gpus == node.gpus:
        cores, memory = node.cores, float(node.memory_gb or 0)
    parts = [
        layout.gpus * table.gpu,
        cores / (table.cores_per_unit or math.inf),
        memory / (table.gb_per_unit or math.inf),
    ]
    return max(parts) * layout.most_nodes * layout.seconds / 3600


def hourly_charge(plan: Plan, site: Site, job: JobOptions | None = None) -> float | None:
    """Computes an hour's charge of a plan in the site's unit; None: unknown, or the site forbids such a job."""
    ask = dataclasses.replace(site.ask, account="none", min_minutes=None)
    hour = dataclasses.replace(job or JobOptions(), time="60m", queue=None)
    with contextlib.suppress(GrappeError):
        return charge(site, layout(plan, dataclasses.replace(site, ask=ask), hour))
    return None


def sliced(site: Site, name: str) -> Site:
    """Returns the site with the slice that a user calls `name` in place of GPUs: a job has one of them.

    Raises:
        UsageError: the site has no such slice.
    """
    called = {part: (part.name, *part.synonyms, part.name.rpartition("_")[2]) for part in site.slice}
    part = next((part for part, names in called.items() if name in names), None)
    if part is None or site.node is None:
        names = [name for names in called.values() for name in names]
        which = nearest(name, names) if names else "it gives whole GPUs alone: write a number"
        raise UsageError(f"--gpus={name}: {site.name} has no such slice of a GPU: {which}")
    node = dataclasses.replace(site.node, slice=part, cores_per_gpu=part.cores, memory_per_gpu_gb=part.memory_gb)
    ask = dataclasses.replace(site.ask, gpus=f"--gpus={part.name}:{GPUS}")
    table = site.charge and dataclasses.replace(site.charge, gpu=part.charge)
    return dataclasses.replace(site, node=node, ask=ask, charge=table)


def fit(plan: Plan, gpus: int | None) -> Plan:
    """Fits the plan to the requested number of GPUs, if any: a plan of one process becomes one replica per GPU.

    Raises:
        PlanError: the plan needs another number of GPUs.
    """
    if gpus is None:
        return plan
    if gpus == 0:
        return dataclasses.replace(plan, device="cpu")
    processes = gpus * plan.per_device
    if plan.processes == 1 and processes > 1:
        return dataclasses.replace(plan, replicate=processes)
    if plan.processes != processes:
        need = -(-plan.processes // plan.per_device)
        raise PlanError(
            f"--gpus={gpus} is {processes} process{'es' if processes > 1 else ''}, the plan {plan} has "
            f"{plan.processes}: use --gpus {need}, or leave it out, or change the plan"
        )
    return plan


def stretched(plan: Plan, processes: int) -> Plan:
    """Returns the plan with another number of processes: replicate or shard changes, the other degrees stay.

    Raises:
        PlanError: there is no such plan.
    """
    key = "shard" if plan.shard > 1 and plan.replicate == 1 else "replicate"
    rest = plan.processes // getattr(plan, key)
    if processes % rest:
        raise PlanError(f"{processes} processes: give a multiple of {rest}, as only {key} of the plan {plan} changes")
    return dataclasses.replace(plan, **{key: processes // rest})


def sizes(plan: Plan, nodes: NumberRange) -> dict[int, Plan]:
    """Returns the plan for each number of nodes on which it can be: `plan` is that of the fewest."""
    plans, per_node = {nodes.least: plan}, plan.processes // nodes.least
    for number in range(nodes.least + 1, nodes.most + 1):
        with contextlib.suppress(PlanError):
            plans[number] = stretched(plan, per_node * number)
    return plans


def on_site(plan: Plan, site: Site) -> Plan:
    """Completes a plan for a site: where its nodes have no GPU, the device is the CPU."""
    if plan.device == "auto" and site.node is not None and not site.node.gpus:
        return dataclasses.replace(plan, device="cpu")
    return plan


def layout(plan: Plan, site: Site, job: JobOptions) -> Layout:
    """Computes the resources of a job for `plan` on `site`, checked against the site's rules.

    Raises:
        PlanError: the plan does not divide into nodes.
        UsageError: the site forbids the job; the message says what the site allows.
    """
    nodes_asked = job.node_range
    if nodes_asked is not None and nodes_asked.most > nodes_asked.least:
        largest_nodes = nodes_asked.most + job.spare
        count = (site.node.count if site.node else None) or largest_nodes
        last = count - job.spare
        if nodes_asked.least <= last < nodes_asked.most:
            raise UsageError(
                f"the largest size takes {largest_nodes} nodes, spare ones included, and {site.name} has {count}: use "
                f"a range that ends at {last} nodes, or another --partition"
            )
        fewest = layout(plan, site, dataclasses.replace(job, nodes=nodes_asked.least))
        plans = sizes(plan, nodes_asked)
        largest = layout(plans[max(plans)], site, dataclasses.replace(job, nodes=max(plans)))
        return dataclasses.replace(fewest, sizes=plans, queue=largest.queue)
    node = site.node
    assert node is not None, "a probed site has its node by now"
    check_account(site, job.account)
    seconds = int(job.seconds or site.ask.default_minutes * 60)
    gpus = 0 if plan.device == "cpu" else _gpus(plan, site, job)
    if gpus and node.vendor == "amd":
        if plan.precision == "tf32":
            raise PlanError(f"precision=tf32 is NVIDIA's, and {site.name} has AMD's GPUs: use precision=bf16, or fp32")
        if plan.per_device > 1:
            raise PlanError(
                f"per_device={plan.per_device} shares GPUs by NVIDIA's MPS, and {site.name} has AMD's: leave it out"
            )
    nodes = _nodes(plan, site, node, None if nodes_asked is None else nodes_asked.least, gpus)
    per_node, all_nodes = gpus // nodes, nodes + job.spare
    limits = (node.count, per_node and site.ask.max_gpus and site.ask.max_gpus // per_node)
    if job.spare and all_nodes > (most_nodes := min(filter(None, limits), default=all_nodes)):
        raise UsageError(
            f"--spare={job.spare}: {all_nodes} nodes with those that the plan needs, and a job on {site.name} may have "
            f"{most_nodes}: use --spare {most_nodes - nodes}, or a smaller plan"
        )
    queue = None if job.own_queue else _queue(site, job.queue, all_nodes, per_node, seconds)
    most, least = site.ask.max_hours, site.ask.min_minutes
    if most and seconds > most * 3600:
        raise UsageError(
            f"--time={_hours(seconds / 3600)}: {site.name} gives at most {_hours(most)}. Ask for that: the job "
            "saves before its end, and goes back into the queue by itself"
        )
    if least and seconds < least * 60:
        raise UsageError(f"--time: {site.name} requires at least {least} minutes")
    _check_whole(site, node, queue, all_nodes, per_node)
    processes = plan.processes // nodes
    cores = job.cores or _cores(plan, node, per_node, processes, queue)
    if cores * processes > node.cores:
        raise UsageError(f"--cores={cores} for {processes} processes on a node: those of {site.name} have {node.cores}")
    memory = _memory(node, per_node, processes * cores)
    if queue is not None and queue.max_memory_gb and memory:
        memory = min(memory, queue.max_memory_gb // all_nodes)
    if per_node:
        _check_gpu_cores(site, node, queue, per_node, processes, cores)
    return Layout(
        nodes=nodes,
        processes=processes,
        gpus=per_node,
        cores=cores,
        memory_gb=_requested(job, node, processes * cores) or memory,
        seconds=seconds,
        queue=queue,
        sizes={nodes: plan} if job.spare else {},
        spare=job.spare,
    )


def longest(layout: Layout, site: Site, job: JobOptions) -> int | None:
    """Returns the most seconds that a job with these resources may ask for; None: no limit is known."""
    limits = [site.ask.max_hours]
    if site.queue and not job.own_queue:
        hours = [
            queue.max_hours
            for queue in site.queue
            if (queue.name == job.queue if job.queue else not queue.only_when_named)
            and _refusal(queue, layout.nodes, layout.gpus, 0) is None
        ]
        limits.append(None if None in hours else max(filter(None, hours), default=None))
    limits_known = [limit for limit in limits if limit is not None]
    return int(min(limits_known) * 3600) if limits_known else None


def check_account(site: Site, account: str | None) -> None:
    """Raises UsageError if the account is missing, or does not have the form of this site's accounts."""
    forms = " or ".join(site.ask.accounts)
    if account is None and site.ask.account == "required":
        raise UsageError(f"{site.name} needs an account: --account NAME{f' (of the form {forms})' if forms else ''}")
    if account is not None and forms and not any(fnmatch.fnmatchcase(account, form) for form in site.ask.accounts):
        raise UsageError(f"--account={account}: accounts of {site.name} are of the form {forms}")


def _gpus(plan: Plan, site: Site, job: JobOptions) -> int:
    if plan.processes % plan.per_device:
        raise PlanError(
            f"{plan.processes} processes do not share GPUs by per_device={plan.per_device}: "
            f"choose degrees whose product is a multiple of {plan.per_device}"
        )
    gpus = plan.processes // plan.per_device
    part = site.node.slice if site.node else None
    if part and (plan.processes > 1 or job.spare):
        raise PlanError(
            f"{part.name} is a slice of a GPU, for one process: slices have no link to each other, {site.name} gives a "
            f"job one, and two processes would halve it; this plan has {plan.processes}: use --gpus {gpus}, or a plan "
            "of one process"
        )
    own = [most for form, most in site.ask.max_gpus_of.items() if fnmatch.fnmatchcase(job.account or "", form)]
    most = min([*own, site.ask.max_gpus or gpus])
    if gpus > most:
        raise UsageError(f"the plan needs {gpus} GPUs, a job on {site.name} may have {most}: use fewer")
    return gpus


def _nodes(plan: Plan, site: Site, node: Node, requested: int | None, gpus: int) -> int:
    """Computes the number of nodes: as requested, or the smallest that the plan fits on."""
    what, units, holds = ("GPUs", gpus, node.gpus) if gpus else ("processes", plan.processes, node.cores)
    if gpus and not node.gpus:
        raise UsageError(f"the nodes of {site.name} have no GPU: add device=cpu to the plan")
    if requested is not None and requested < 1:
        raise UsageError(f"--nodes={requested}: it must be at least 1")
    if requested is not None and requested > units:
        raise UsageError(f"--nodes={requested}: the plan needs {units} {what}: use --nodes {units}, or fewer")
    nodes = requested or -(-units // holds)
    if node.count is not None and nodes > node.count:
        raise UsageError(
            f"the plan needs {units} {what} on {nodes} nodes, {site.name} has {node.count} with {holds} each "
            f"({node.count * holds} in all): use a smaller plan"
        )
    if units % nodes:
        rest = "" if requested else f" of {holds} {what}"
        better = next(count for count in range(nodes, units + 1) if units % count == 0)
        full = units // holds * holds
        other = f", or degrees whose product is {full * (plan.per_device if gpus else 1)}" if full else ""
        raise PlanError(f"{units} {what} do not divide into {nodes} nodes{rest}: use --nodes {better}{other}")
    if units // nodes > holds:
        raise UsageError(
            f"{units} {what} on {nodes} node{'s' if nodes > 1 else ''} are {units // nodes} each, a node of "
            f"{site.name} has {holds}: use --nodes {-(-units // holds)}"
        )
    return nodes


def _queue(site: Site, name: str | None, nodes: int, gpus: int, seconds: int) -> Queue | None:
    if name is not None:
        for queue in site.queue:
            if queue.name == name:
                if why := _refusal(queue, nodes, gpus, seconds):
                    raise UsageError(f"--queue={name}: {why}")
                return queue
        names = [queue.name for queue in site.queue]
        raise UsageError(f"{site.name} has no queue '{name}': {nearest(name, names)}")
    reasons = {queue.name: _refusal(queue, nodes, gpus, seconds) for queue in site.queue}
    usual = [queue for queue in site.queue if not queue.only_when_named]
    for queue in usual:
        if reasons[queue.name] is None:
            return queue
    if not usual:
        return None
    refused = "; ".join(f"{queue.name}: {reasons[queue.name]}" for queue in usual)
    if named := next((name for name, why in reasons.items() if why is None), ""):
        raise UsageError(f"no queue of {site.name} admits it. {refused}. If you name it: --queue {named}")
    raise UsageError(f"no queue of {site.name} admits it. {refused}")


def _refusal(queue: Queue, nodes: int, gpus: int, seconds: int) -> str | None:
    if queue.max_hours and seconds > queue.max_hours * 3600:
        return f"at most {_hours(queue.max_hours)}, this job asks for {_hours(seconds / 3600)}"
    if queue.min_gpus and nodes * gpus < queue.min_gpus:
        return f"at least {queue.min_gpus} GPUs, this job asks for {nodes * gpus}"
    if queue.max_gpus and nodes * gpus > queue.max_gpus:
        return f"at most {queue.max_gpus} GPUs, this job asks for {nodes * gpus}"
    if queue.max_nodes and nodes > queue.max_nodes:
        return f"at most {queue.max_nodes} nodes, this job asks for {nodes}"
    return None


def _gives_whole(site: Site, queue: Queue | None) -> bool:
    """Returns whether a job of several GPUs holds whole nodes."""
    return site.ask.whole_nodes if queue is None or queue.whole_nodes is None else queue.whole_nodes


def _check_gpu_cores(site: Site, node: Node, queue: Queue | None, gpus: int, processes: int, cores: int) -> None:
    """Checks the cores of a part of a node, where the scheduler refuses other numbers for each GPU."""
    least, total = gpus * (node.cores_per_gpu or 0), processes * cores
    rule = "" if _gives_whole(site, queue) else site.ask.gpu_cores
    if (rule and total < least) or (rule == "exact" and total > least):
        raise UsageError(
            f"{site.name} takes {'exactly' if rule == 'exact' else 'at least'} {node.cores_per_gpu} cores for each "
            f"GPU, and the job has {total} for {gpus}: leave --cores out, or use processes whose number divides {least}"
        )


def _check_whole(site: Site, node: Node, queue: Queue | None, nodes: int, gpus: int) -> None:
    if not _gives_whole(site, queue) or gpus in (0, node.gpus) or (nodes == 1 and gpus in site.ask.part_nodes):
        return
    where = f"{site.name}, {queue.name}" if queue else site.name
    parts = "".join(f"{part} or " for part in site.ask.part_nodes)
    raise PlanError(
        f"{where} gives whole nodes: {parts}a multiple of {node.gpus} GPUs; this plan has {nodes * gpus}, "
        f"{gpus} on each of {nodes} node{'s' if nodes > 1 else ''}"
    )


def _cores(plan: Plan, node: Node, gpus: int, processes: int, queue: Queue | None) -> int:
    """Computes each process's cores: its GPU's share of the node; without GPUs, one per thread and data worker."""
    if gpus:
        total = min(node.cores_of(gpus), (queue.max_cores if queue else None) or node.cores)
        cores = total // processes
        if not cores:
            raise PlanError(
                f"{processes} processes on {total} cores: use fewer on a GPU (per_device={plan.per_device} now)"
            )
        return cores
    busy = (plan.threads or 1) + (plan.workers or 0)
    return max(1, min(busy, node.cores // processes))


def _memory(node: Node, gpus: int, cores: int) -> int | None:
    """Gigabytes on a node for this number of GPUs, or of cores where there are no GPUs."""
    if node.memory_gb is None:
        return None
    if gpus == node.gpus > 0:
        return node.memory_gb
    if gpus:
        return gpus * (node.memory_per_gpu_gb or node.memory_gb // node.gpus)
    return max(1, node.memory_gb * cores // node.cores)


def _requested(job: JobOptions, node: Node, cores: int) -> float | None:
    """Gigabytes of each node by the user's --mem or --mem-per-cpu, as Slurm reads them; None: by neither."""
    for text, times in ((job.mem, 1), (job.mem_per_cpu, cores)):
        if match := re.fullmatch(r"(\d{1,9})([KMGT]?)", text or "", re.ASCII):
            unit = 1024.0 ** ("KMGT".index(match[2] or "M") - 2)
            return times * int(match[1]) * unit or node.memory_gb  # 0: all of it
    return None


def _hours(hours: float) -> str:
    return f"{hours * 60:.0f} min" if hours < 1 else f"{hours:g} h"
