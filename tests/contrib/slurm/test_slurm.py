"""The generic site: what sinfo says of real clusters' partitions."""

from pathlib import Path

import pytest

from grappe import sites
from grappe import slurm as notebook
from grappe.contrib.doctor.checks import job, note
from grappe.contrib.slurm import slurm
from grappe.errors import UsageError
from tests.typed import stand_in

TEXT = """cpu|64|257000+|(null)|1-00:00:00|100|1-infinite
gpu*|48|498000|gpu:a100:4(S:0-1),tmp:1|7-00:00:00|12|1-4
gpu*|32|187000|gpu:v100:2|7-00:00:00|2|1-4
big|96|749000|gpu:8|infinite|1|2
a line of another form
"""


def test_the_default_partition_with_the_most_gpus_or_a_named_one() -> None:
    site = slurm.probed(sites.find("generic"), TEXT, None, wants_gpus=True)
    assert (site.node.gpus, site.node.cores, site.node.memory_gb, site.node.count) == (4, 48, 486, 12)
    assert site.ask.gpus == "--gres=gpu:a100:{gpus}"
    assert site.queue[0].options == ("--partition=gpu",)
    named = slurm.probed(sites.find("generic"), TEXT, "big", wants_gpus=True)
    assert (named.ask.gpus, named.ask.max_hours) == ("--gres=gpu:{gpus}", None)


def test_what_is_not_there() -> None:
    generic = sites.find("generic")
    with pytest.raises(UsageError, match="no partition 'gpus' here: did you mean gpu"):
        slurm.probed(generic, TEXT, "gpus", wants_gpus=True)
    with pytest.raises(UsageError, match="no node of partition cpu has a GPU"):
        slurm.probed(generic, TEXT, "cpu", wants_gpus=True)
    with pytest.raises(UsageError, match="is Slurm running"):
        slurm.probed(generic, "", None, wants_gpus=False)


@pytest.mark.parametrize("backup", ["UP", "DOWN", None])
def test_a_controller_is_alive_if_one_of_them_is_or_nobody_can_ask(backup: str | None, tmp_path, monkeypatch) -> None:
    """Slurm's commands are stand-ins; some containers have no scontrol."""
    commands = {"squeue": "echo '7|mine|RUNNING|None|N/A|1:00|1'", "sbatch": "true"}
    if backup is not None:
        commands["scontrol"] = f"echo 'Slurmctld(primary) at a is DOWN'; echo 'Slurmctld(backup) at b is {backup}'"
    stand_in(tmp_path, **commands)
    monkeypatch.setenv("PATH", str(tmp_path))
    if backup == "DOWN":
        assert slurm.queue_now() is None
        with pytest.raises(slurm.ControllerDown, match=r"gives no answer \(Slurmctld\(primary\) at a is DOWN\)"):
            slurm.queue()
        for lines, words in (("", "scontrol printed nothing"), ("exit 3", r"\(scontrol: exit code 3\)")):
            stand_in(tmp_path, scontrol=lines)
            with pytest.raises(slurm.ControllerDown, match=words):
                slurm.queue()
    else:
        assert [entry.job for entry in slurm.queue()] == ["7"]


def answers(folder: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str) -> None:
    """Puts stand-ins of Slurm's commands on the PATH."""
    sinfo = "echo 'cpu*|64|257000|(null)|1-00:00:00|100|1-infinite'"
    stand_in(folder, sbatch=sbatch, scontrol="echo UP", sinfo=sinfo)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_run_whose_job_may_be_in_the_queue_keeps_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(slurm.NoAnswer, match="no answer in 0 s"):
        slurm.run("sleep", "9", seconds=0.1)
    answers(tmp_path, monkeypatch, "echo 'Socket timed out on send/recv operation' >&2; exit 1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(slurm.NoAnswer, match="may be in the queue"):
        notebook.submit("digits --run run --plan device=cpu", site="generic", account="a")
    assert (tmp_path / "run/logs/submit-1.sh").is_file()


def test_a_refused_submission_takes_back_what_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another command may write into the run's folder meanwhile."""
    other = tmp_path / "runs/run/mine"
    monkeypatch.chdir(tmp_path)
    for meanwhile, left in (("true", []), (f"touch {other}", ["bin", "runs", "runs/run", "runs/run/mine"])):
        answers(tmp_path / "bin", monkeypatch, f"{meanwhile}; echo no >&2; exit 1")
        with pytest.raises(slurm.SlurmError, match="no"):
            notebook.submit("digits --run runs/run --plan device=cpu", site="generic", account="a")
        found = {str(entry.relative_to(tmp_path)) for entry in tmp_path.rglob("*") if "bin/" not in str(entry)}
        assert found == {"bin", *left}


def test_a_machine_of_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's programs are installed, and no cluster is configured: a stand-in says what they then do."""
    no_cluster = "echo 'scontrol: fatal: Could not establish a configuration source' >&2; exit 1"
    stand_in(tmp_path, **dict.fromkeys(("scontrol", "sbatch", "sinfo"), no_cluster))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for ask in (slurm.check_controller, lambda: slurm.run("sinfo")):
        with pytest.raises(UsageError, match=r"^no Slurm here: no Slurm controller is reachable .* --site NAME"):
            ask()
    (finding,) = job.of_sbatch()
    assert finding == note("no Slurm here: no Slurm controller is reachable from this machine")
