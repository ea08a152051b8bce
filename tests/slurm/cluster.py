"""A real Slurm on this machine: four nodes that run jobs, and nodes of other sites' shapes that only judge scripts."""

import argparse
import contextlib
import getpass
import hashlib
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

from tests.patience import PATIENCE_SECONDS
from tests.slurm import configuration
from tests.slurm.configuration import CPUS, GPUS, NODES, Shape

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
FOR_ACCOUNTING = ("slurmdbd", "mariadbd")
MARK = "GRAPPE_CLUSTER"  # the variable that finds all that belongs to a cluster
CLONE = hashlib.sha256(str(Path(__file__).resolve().parents[2]).encode()).hexdigest()[:8]
HOME = Path(f"/tmp/grappe-slurm-{os.getuid()}-{CLONE}")  # of the cluster that `make slurm-up` starts


def missing(accounting: bool = False) -> list[str]:
    """The programs that the cluster needs and this machine lacks."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    names = NEEDED + (FOR_ACCOUNTING if accounting else ())
    lacks = [name for name in names if shutil.which(name, path=path) is None]
    return lacks if os.geteuid() == 0 else [*lacks, "root's rights"]


class PortTaken(AssertionError):
    """A daemon found its port in use."""


class Cluster:
    """The daemons of a four-node Slurm in one folder; `up` starts them, `down` ends them and leaves nothing.

    Args:
        folder: short, as names of sockets must be; removed by `down`.
        accounting: keep jobs in a database (slurmdbd, mariadbd).
    """

    def __init__(self, folder: Path, shapes: Iterable[Shape] = (), *, accounting: bool = False) -> None:
        self.folder, self.accounting = folder, accounting
        self._shapes = list(shapes)
        self._ports = dict(zip(("ctld", *NODES, "dbd", "sql"), _free_ports(3 + len(NODES)), strict=True))

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

    def up(self, tries: int = 3) -> None:
        """Starts all daemons, and waits until all nodes take jobs; again where another program took a port first."""
        try:
            self._up()
        except PortTaken:
            if tries == 1:
                raise
            self._ports = dict(zip(self._ports, _free_ports(len(self._ports)), strict=True))
            self.up(tries - 1)

    def _up(self) -> None:
        self.folder.mkdir(parents=True)
        try:
            self._munge()
            self._configure()
            if self.accounting:
                self._accounting()
            self._daemon("slurmctld", "-D")
            for node in NODES:
                self.start_node(node)
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
        return [pid for pid in _pids() if pid != os.getpid() and _belongs(pid, str(self.folder))]

    def _states(self) -> list[str]:
        return self.run("sinfo", "-h", "-n", ",".join(NODES), "-p", "wide", "-o", "%T", check=False).split()

    def start_node(self, node: str) -> None:
        """Starts the node's daemon."""
        self._daemon("slurmd", "-D", "-N", node)

    def stop_node(self, node: str) -> None:
        """Kills the node's daemon and all that runs there, as a node does that loses its power."""
        victims = [int((self.folder / f"slurmd-{node}.pid").read_text())]
        for pid in self.pids():
            if f"SLURMD_NODENAME={node}\0" in Path(f"/proc/{pid}/environ").read_text(errors="replace"):
                parent = int(
                    Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
                )  # slurmstepd, of a task
                victims += [pid, parent] if "slurmstepd" in Path(f"/proc/{parent}/comm").read_text() else [pid]
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

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
            if any("Address already in use" in log.read_text(errors="replace") for log in self.folder.glob("*.log")):
                raise PortTaken(self.words())
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
        text = configuration.slurm_conf(self.folder, self._ports, self._shapes, accounting=self.accounting)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        for index in range(GPUS):
            (self.folder / f"g{index}").touch()
        (self.folder / "gres.conf").write_text(configuration.gres_conf(self.folder, self._shapes))
        (self.folder / "state").mkdir()

    def _accounting(self) -> None:
        data, socket_ = self.folder / "sql", self.folder / "sql.socket"
        install = ["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--skip-test-db"]
        subprocess.run([*install, "--auth-root-authentication-method=normal"], check=True, capture_output=True)
        self._daemon(
            "mariadbd", "--no-defaults", f"--datadir={data}", f"--socket={socket_}", "--user=root",
            f"--port={self._ports['sql']}", "--bind-address=127.0.0.1", f"--pid-file={self.folder}/sql.pid",
            "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M", "--innodb-flush-log-at-trx-commit=0",
        )  # fmt: skip
        self._wait(socket_.exists, "database")
        words = "CREATE USER slurm@'127.0.0.1' IDENTIFIED BY 'x'; GRANT ALL ON *.* TO slurm@'127.0.0.1';"
        self.run("mariadb", "--no-defaults", f"--socket={socket_}", "-e", words)
        conf = self.folder / "slurmdbd.conf"
        conf.write_text(configuration.slurmdbd_conf(self.folder, self._ports))
        conf.chmod(0o600)
        self._daemon("slurmdbd", "-D")
        self._wait((self.folder / "slurmdbd.pid").exists, "accounting")
        # What a site's users have: one account. The cluster is named before its controller asks.
        manager = ("sacctmgr", "-i", "add")
        self._wait(lambda: self.run(*manager, "cluster", "test", check=False), "accounting")
        self.run(*manager, "account", "def-test", "Cluster=test", "Description=test", "Organization=test")
        self.run(*manager, "user", getpass.getuser(), "Account=def-test", "Cluster=test")


def _free_ports(count: int) -> list[int]:
    """Returns ports that no connection of another program takes before the daemons listen there."""
    ports: set[int] = set()
    while len(ports) < count:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", 10_000 + secrets.randbelow(22_000)))  # Linux gives connections those above
            ports.add(free.getsockname()[1])
    return sorted(ports)


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
    request = parser.parse_args()
    cluster = Cluster(HOME, accounting=request.accounting)
    if request.what == "down":
        cluster.down()
        return
    if lacks := missing(request.accounting):
        sys.exit(f"this machine lacks {', '.join(lacks)}: apt-get install slurm-wlm munge (see .ci/run)")
    if HOME.exists():
        sys.exit(f"there is one in {HOME}: make slurm-down ends it")
    cluster.up()
    print(f"four nodes, {CPUS} cores and {GPUS} pretended GPUs each; to use it in this shell:")
    print(f"  export SLURM_CONF={cluster.environment['SLURM_CONF']}")


if __name__ == "__main__":
    main()
