"""The test cluster's configuration files: four nodes that run jobs, and nodes of other sites' shapes."""

import dataclasses
import getpass
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

NODES = ("n0", "n1", "n2", "n3")
"""Two of the partitions gpu, low and high; and all four of the partition wide."""
GPUS = 4
CPUS = 8
MEGABYTES = 20000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Nodes of another site, in state CLOUD: `sbatch --test-only` judges scripts for them, and nothing can run."""

    name: str
    nodes: int
    cpus: int
    megabytes: int
    gres: str
    """`gpu:a100:4`, several with commas between, or nothing."""
    minutes: int
    features: str = ""


def slurm_conf(folder: Path, ports: Mapping[str, int], shapes: Sequence[Shape], *, accounting: bool) -> str:
    """slurm.conf."""
    host = socket.gethostname().partition(".")[0]
    me = getpass.getuser()
    if accounting:
        storage = f"""AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={ports["dbd"]}
AccountingStoragePass={folder}/munge.socket
AccountingStorageEnforce=associations,limits,qos
JobAcctGatherType=jobacct_gather/linux"""
    else:
        storage = "AccountingStorageType=accounting_storage/none"
    names = {"host": host, "me": me, "folder": folder, "storage": storage, "nodes": ",".join(NODES)}
    text = Path(__file__).with_name("slurm.conf").read_text().format(port=ports["ctld"], **names)
    for node in NODES:
        text += (
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[node]} "
            f"CPUs={CPUS} RealMemory={MEGABYTES} Gres=gpu:{GPUS} State=UNKNOWN\n"
        )
    for shape in shapes:
        text += _node_line(shape)
    common = "Nodes=n0,n1 MaxTime=7-00:00:00 DefaultTime=10 State=UP"
    text += f"PartitionName=gpu {common} Default=YES PriorityTier=5 PreemptMode=OFF\n"
    text += f"PartitionName=low {common} PriorityTier=1 PreemptMode=REQUEUE GraceTime=20\n"
    text += f"PartitionName=high {common} PriorityTier=10 PreemptMode=OFF\n"
    text += f"PartitionName=wide {common.replace('n0,n1', ','.join(NODES))} PriorityTier=5 PreemptMode=OFF\n"
    for shape in shapes:
        text += (
            f"PartitionName={shape.name} Nodes={_hosts(shape)} MaxTime={shape.minutes} DefaultTime=10 "
            "State=UP PreemptMode=OFF\n"
        )
    return text


def gres_conf(folder: Path, shapes: Sequence[Shape]) -> str:
    """gres.conf: the four nodes' GPUs are empty files; the others' are counted only."""
    lines = ["AutoDetect=off"]
    lines += [f"NodeName={node} Name=gpu File={folder}/g[0-{GPUS - 1}]" for node in NODES]
    for shape in shapes:
        for gres in filter(None, shape.gres.split(",")):
            _, *kind, count = gres.split(":")
            model = f"Type={kind[0]} " if kind else ""
            lines.append(f"NodeName={_hosts(shape)} Name=gpu {model}Count={count}")
    return "\n".join(lines) + "\n"


def slurmdbd_conf(folder: Path, ports: Mapping[str, int]) -> str:
    """slurmdbd.conf."""
    return f"""AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdPort={ports["dbd"]}
SlurmUser={getpass.getuser()}
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={ports["sql"]}
StorageUser=slurm
StoragePass=x
StorageLoc=slurm
"""


def _hosts(shape: Shape) -> str:
    return f"{shape.name}-[1-{shape.nodes}]" if shape.nodes > 1 else f"{shape.name}-1"


def _node_line(shape: Shape) -> str:
    line = f"NodeName={_hosts(shape)} CPUs={shape.cpus} RealMemory={shape.megabytes} State=CLOUD"
    if shape.gres:
        line += f" Gres={shape.gres}"
    if shape.features:
        line += f" Feature={shape.features}"
    return line + "\n"
