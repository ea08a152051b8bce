"""A controller of Slurm that does not answer is known within seconds, where Slurm's own commands wait a minute."""

import os
import signal
from pathlib import Path

import pytest

from grappe.cli import commands
from grappe.contrib.doctor.checks import job
from grappe.contrib.slurm import slurm
from tests.commands import SLOW
from tests.slurm import configuration
from tests.slurm.cluster import Cluster


def test_a_controller_that_is_down(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens at its port; submit says so before it asks pip, and leaves nothing."""
    ports = dict.fromkeys(("ctld", *configuration.NODES), 1)  # of tcpmux, which is nowhere
    folder = tmp_path / "conf"
    folder.mkdir()
    text = configuration.slurm_conf(cluster.folder, ports, [], accounting=False)
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for options in (("--site", "generic"), ("--site", "narval", "--account", "def-me")):
        with pytest.raises(slurm.ControllerDown, match=r"is DOWN.*try again in a minute"):
            commands.app(["submit", *options, "--", "train", SLOW], exit_on_error=False, print_error=False)
    assert not list(here.iterdir())


def test_a_controller_that_hangs(cluster: Cluster) -> None:
    (controller,) = (pid for pid in cluster.pids() if Path(f"/proc/{pid}/comm").read_text() == "slurmctld\n")
    os.kill(controller, signal.SIGSTOP)
    try:
        (finding,) = job.of_sbatch()
    finally:
        os.kill(controller, signal.SIGCONT)
    assert finding.level == "warning" and "scontrol gave no answer in 4 s" in finding.what
    slurm.check_controller()
