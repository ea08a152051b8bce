"""A real Slurm on this machine: two nodes that run jobs, and nodes of other sites' shapes that only judge scripts."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
FOR_ACCOUNTING = ("slurmdbd", "mariadbd")
MARK = "GRAPPE_CLUSTER"  # the variable that finds all that belongs to a cluster
HOME = Path("/tmp/grappe-slurm")  # of the cluster that `make slurm-up` starts
PATIENCE_SECONDS = 60.0
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
    """`gpu:a100:4`, or nothing."""
    minutes: int
    features: str = ""


def missing(accounting: bool = False) -> list[str]:
    """The programs that the cluster needs and this machine lacks."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    names = NEEDED + (FOR_ACCOUNTING if accounting else ())
    lacks = [name for name in names if shutil.which(name, path=path) is None]
    return lacks if os.geteuid() == 0 else [*lacks, "root's rights"]


class Cluster:
    """The daemons of a two-node Slurm in one folder; `up` starts them, `down` ends them and leaves nothing.

    Args:
        folder: short, as names of sockets must be; removed by `down`.
        accounting: keep jobs in a database (slurmdbd, mariadbd).
    """

    def __init__(self, folder: Path, shapes: Iterable[Shape] = (), *, accounting: bool = False) -> None:
        self.folder, self.accounting = folder, accounting
        self._shapes = list(shapes)
        self._ports = dict(zip(("ctld", "n0", "n1", "dbd", "sql"), _free_ports(5), strict=True))

    @property
    def environment(self) -> dict[str, str]:
        """Variables that lead Slurm's commands here."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), MARK: str(self.folder)}

    def run(self, *command: str, check: bool = True) -> str:
        """The standard output of one of Slurm's commands."""
        done = subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True, check=False
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: {done.stdout}{done.stderr}{self.words()}")
        return done.stdout

    def up(self) -> None:
        """Starts all daemons, and waits until both nodes take jobs."""
        self.folder.mkdir(parents=True)
        try:
            self._munge()
            self._configure()
            if self.accounting:
                self._accounting()
            self._daemon("slurmctld", "-D")
            for node in ("n0", "n1"):
                self._daemon("slurmd", "-D", "-N", node)
            self._wait(lambda: self._states() == ["idle"], "idle nodes")
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Ends jobs and daemons, the steps' own daemons too."""
        with contextlib.suppress(AssertionError):
            self.run("scancel", "--signal=KILL", "--full", "--user", getpass.getuser(), check=False)
        for number, patience in ((signal.SIGTERM, 8.0), (signal.SIGKILL, 5.0)):
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline = time.monotonic() + patience
            while self.pids() and time.monotonic() < deadline:
                time.sleep(0.1)
        shutil.rmtree(self.folder, ignore_errors=True)

    def pids(self) -> list[int]:
        """The living processes that belong to it: daemons, slurmstepd, jobs."""
        return [pid for pid in _pids() if _belongs(pid, str(self.folder))]

    def _states(self) -> list[str]:
        return self.run("sinfo", "-h", "-n", "n0,n1", "-p", "gpu", "-o", "%T", check=False).split()

    def words(self) -> str:
        """The ends of the daemons' logs."""
        return "".join(
            f"\n--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-8:])
            for log in sorted(self.folder.glob("*.log"))
        )

    def _wait(self, true: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not true():
            if time.monotonic() > deadline:
                raise AssertionError(f"the test cluster has no {what}{self.words()}")
            time.sleep(0.1)

    def _daemon(self, *command: str) -> None:
        path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
        log = (self.folder / f"out-{command[0]}.log").open("ab")
        with log:
            subprocess.Popen(
                command,
                env={**os.environ, **self.environment, "PATH": path},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket",
            f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log",
            f"--seed-file={self.folder}/munged.seed",
        )  # fmt: skip
        self._wait((self.folder / "munge.socket").exists, "munge socket")

    def _configure(self) -> None:
        (self.folder / "slurm.conf").write_text(self._slurm_conf())
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        gpus = [self.folder / f"g{index}" for index in range(GPUS)]
        for gpu in gpus:
            gpu.touch()
        lines = ["AutoDetect=off"]
        lines += [f"NodeName={node} Name=gpu File={self.folder}/g[0-{GPUS - 1}]" for node in ("n0", "n1")]
        for shape in self._shapes:
            if shape.gres:
                _, *kind, count = shape.gres.split(":")
                model = f"Type={kind[0]} " if kind else ""
                lines.append(f"NodeName={_hosts(shape)} Name=gpu {model}Count={count}")
        (self.folder / "gres.conf").write_text("\n".join(lines) + "\n")
        (self.folder / "state").mkdir()

    def _slurm_conf(self) -> str:
        host = socket.gethostname().partition(".")[0]
        me = getpass.getuser()
        folder = self.folder
        if self.accounting:
            storage = f"""AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={self._ports["dbd"]}
AccountingStoragePass={folder}/munge.socket
AccountingStorageEnforce=associations,limits,qos
JobAcctGatherType=jobacct_gather/linux"""
        else:
            storage = "AccountingStorageType=accounting_storage/none"
        text = f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={self._ports["ctld"]}
SlurmUser={me}
SlurmdUser={me}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
MpiDefault=none
GresTypes=gpu
JobRequeue=1
EnforcePartLimits=ALL
KillWait=5
MinJobAge=60
SlurmdTimeout=15
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,sched_interval=1,bf_interval=1
{storage}
JobCompType=jobcomp/none
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=600
SuspendExcNodes=n0,n1
"""
        for node in ("n0", "n1"):
            text += (
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={self._ports[node]} "
                f"CPUs={CPUS} RealMemory={MEGABYTES} Gres=gpu:{GPUS} State=UNKNOWN\n"
            )
        for shape in self._shapes:
            text += _node_line(shape)
        common = "Nodes=n0,n1 MaxTime=7-00:00:00 DefaultTime=10 State=UP"
        text += f"PartitionName=gpu {common} Default=YES PriorityTier=5 PreemptMode=OFF\n"
        text += f"PartitionName=low {common} PriorityTier=1 PreemptMode=REQUEUE GraceTime=20\n"
        text += f"PartitionName=high {common} PriorityTier=10 PreemptMode=OFF\n"
        for shape in self._shapes:
            text += (
                f"PartitionName={shape.name} Nodes={_hosts(shape)} MaxTime={shape.minutes} DefaultTime=10 "
                "State=UP PreemptMode=OFF\n"
            )
        return text

    def _accounting(self) -> None:
        data, socket_ = self.folder / "sql", self.folder / "sql.socket"
        install = ["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--skip-test-db"]
        subprocess.run(
            [*install, "--auth-root-authentication-method=normal"], check=True, capture_output=True
        )
        self._daemon(
            "mariadbd", "--no-defaults", f"--datadir={data}", f"--socket={socket_}", "--user=root",
            f"--port={self._ports['sql']}", "--bind-address=127.0.0.1", f"--pid-file={self.folder}/sql.pid",
            "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M", "--innodb-flush-log-at-trx-commit=0",
        )  # fmt: skip
        self._wait(socket_.exists, "database")
        words = "CREATE USER slurm@'127.0.0.1' IDENTIFIED BY 'x'; GRANT ALL ON *.* TO slurm@'127.0.0.1';"
        self.run("mariadb", "--no-defaults", f"--socket={socket_}", "-e", words)
        conf = self.folder / "slurmdbd.conf"
        conf.write_text(f"""AuthType=auth/munge
AuthInfo=socket={self.folder}/munge.socket
DbdHost=localhost
DbdPort={self._ports["dbd"]}
SlurmUser={getpass.getuser()}
LogFile={self.folder}/slurmdbd.log
PidFile={self.folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={self._ports["sql"]}
StorageUser=slurm
StoragePass=x
StorageLoc=slurm
""")
        conf.chmod(0o600)
        self._daemon("slurmdbd", "-D")
        self._wait((self.folder / "slurmdbd.pid").exists, "accounting")
        # What a site's users have: one account. The cluster is named before its controller asks.
        manager = ("sacctmgr", "-i", "add")
        self._wait(lambda: self.run(*manager, "cluster", "test", check=False), "accounting")
        self.run(*manager, "account", "def-test", "Cluster=test", "Description=test", "Organization=test")
        self.run(*manager, "user", getpass.getuser(), "Account=def-test", "Cluster=test")


def _hosts(shape: Shape) -> str:
    return f"{shape.name}-[1-{shape.nodes}]" if shape.nodes > 1 else f"{shape.name}-1"


def _node_line(shape: Shape) -> str:
    line = f"NodeName={_hosts(shape)} CPUs={shape.cpus} RealMemory={shape.megabytes} State=CLOUD"
    if shape.gres:
        line += f" Gres={shape.gres}"
    if shape.features:
        line += f" Feature={shape.features}"
    return line + "\n"


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _belongs(pid: int, folder: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        environment = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return False
    return state != "Z" and f"{MARK}={folder}" in environment


def main() -> None:
    """`up`: starts the cluster for trying things by hand, and says how to reach it. `down`: ends it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("what", choices=["up", "down"])
    parser.add_argument("--accounting", action="store_true", help="keep jobs in a database, for sacct")
    asked = parser.parse_args()
    cluster = Cluster(HOME, accounting=asked.accounting)
    if asked.what == "down":
        cluster.down()
        return
    if lacks := missing(asked.accounting):
        sys.exit(f"this machine lacks {', '.join(lacks)}: apt-get install slurm-wlm munge (see .ci/run)")
    if HOME.exists():
        sys.exit(f"there is one in {HOME}: make slurm-down ends it")
    cluster.up()
    print(f"two nodes, {CPUS} cores and {GPUS} pretended GPUs each; to use it in this shell:")
    print("\n".join(f"  export {name}={value}" for name, value in cluster.environment.items()))


if __name__ == "__main__":
    main()
