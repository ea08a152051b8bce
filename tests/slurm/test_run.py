"""Trainings on two nodes of a real Slurm: the right rank on the right node, and the numbers of a local run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grappe.training.run import Run
from tests.commands import SLOW, ran
from tests.patience import PATIENCE_SECONDS
from tests.slurm.cluster import Cluster
from tests.slurm.configuration import CPUS
from tests.slurm.jobs import grappe, submit, waited
from tests.wheelhouse import wheel, wheelhouse

WHERE = str(Path(__file__).with_name("where.py"))
PLAIN = "threads=1,workers=0,device=cpu"
GRAPPE = (sys.executable, "-m", "grappe")


def losses(run: Path) -> list[tuple[int, float]]:
    return [(one["step"], one["loss"]) for one in Run(run).records("evaluation")]


def test_four_processes_on_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """The same losses as on this machine without Slurm."""
    run = tmp_path / "run"
    said = submit("--nodes", "2", "--", "train", WHERE, "--run", "run", "--plan", "replicate=4,threads=1", cwd=tmp_path)
    assert "4 GPUs for at most 00:10:00: 0.667 GPU-hours" in said
    grappe("train", WHERE, "--run", "local", "--plan", "threads=1", cwd=tmp_path)
    grappe("wait", "run", cwd=tmp_path)
    logs = (run / "logs").glob("job-*.out")
    text = "".join(file.read_text() for file in logs)
    found = sorted(line.split(": here: ") for line in text.splitlines() if ": here: " in line)
    each = CPUS // 4  # half of a node's GPUs bring half of its cores, for two processes
    assert found == [[str(rank), f"{rank} n{rank // 2} {each}"] for rank in range(4)], text
    expected = losses(tmp_path / "local")
    assert [step for step, _ in losses(run)] == [step for step, _ in expected] and len(expected) == 2
    assert [loss for _, loss in losses(run)] == pytest.approx([loss for _, loss in expected], rel=1e-3)


@pytest.mark.parametrize(
    ("how", "processes"),
    [
        pytest.param("srun -N2 -n3 --job-name=bash {grappe}", 3, id="uneven, without sbatch, named bash"),
        pytest.param("salloc -Q -N2 -n2 srun {grappe}", 2, id="srun inside salloc"),
        pytest.param("salloc -Q -N2 -n2 {grappe}", 1, id="inside salloc, not one of its tasks"),
        pytest.param("srun -N1 -n1 {torchrun}", 2, id="torchrun inside a job"),
    ],
)
def test_other_ways_into_slurm(cluster: Cluster, tmp_path: Path, how: str, processes: int) -> None:
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2 -m -- grappe"
    words = how.format(grappe=" ".join(GRAPPE), torchrun=torchrun).split()
    plan = f"{PLAIN},replicate={processes}"
    train = ["train", SLOW, "epochs=1", "pause=0", "--run", "run", "--plan", plan]
    done = subprocess.run(
        [*words, *train], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert Run(tmp_path / "run").is_finished()
    assert f"slow on {processes} process{'es' if processes > 1 else ''} (cpu" in done.stdout
    assert done.stdout.count("finished, 8 steps") == 1


def test_a_shell_with_an_older_jobs_variables(tmp_path: Path) -> None:
    stale = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_NNODES": "2", "SLURM_LOCALID": "0"}
    words = ("train", SLOW, "epochs=1", "pause=0", "--run", "run", "--plan", PLAIN)
    done = ran(*GRAPPE, *words, cwd=tmp_path, **stale)
    assert done.returncode == 0, done.stderr
    assert "slow on 1 process (cpu" in done.stdout


def test_the_doctor_ends_a_sick_job_in_its_first_step(cluster: Cluster, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    grappe(
        "submit", "--site", "generic", "--nodes", "2", "--time", "10m",
        "--", "train", SLOW, "--run", "run", "--plan", f"{PLAIN},replicate=2", cwd=tmp_path,
    )  # fmt: skip
    grappe("wait", "run", cwd=tmp_path, code=1)
    said = grappe("logs", "run", cwd=tmp_path)
    assert "ERROR: GLOO_SOCKET_IFNAME=nosuch0, and this node has" in said
    assert "unset GLOO_SOCKET_IFNAME" in said
    assert not Run.is_run(tmp_path / "run")
    assert not (tmp_path / "run" / "logs" / "killed").exists()  # it was not tried again


MINE = """title = "Mine"
source = "https://example.org"
date = 2026-11-20
[node]
gpus = 4
gpu = "pretended"
cores = 8
[ask]
gpus = "--gres=gpu:{gpus}"
[job]
environment = "virtualenv"
local = "$NODE_LOCAL"
variables = { MY_NAME = "it's $HOME" }
"""


@pytest.mark.slow
def test_an_environment_and_data_on_the_node(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh account: an empty HOME, no network, wheels without grappe, and a task that imports one more package.

    The first job makes the environment, and the doctor looks at it; the second, on nodes that are new to it, unpacks
    what the first kept.
    """
    for name in ("home", "tasks"):
        (tmp_path / name).mkdir()
    mine = tmp_path / "home" / "sites"
    mine.mkdir()
    (mine / "mine.toml").write_text(MINE)
    folder = tmp_path / "home" / ".config" / "grappe"
    folder.mkdir(parents=True)
    (folder / "sites").symlink_to(mine)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheelhouse(tmp_path / "wheels")))
    (tmp_path / "tasks" / "mine.py").write_text(f"{Path(SLOW).read_text()}\nimport extra\nprint('has', extra.NAME)\n")
    (tmp_path / "images").write_text("data")
    subprocess.run(["tar", "-cf", "data.tar", "images"], cwd=tmp_path, check=True)
    submit = ("submit", "--site", "mine", "--time", "10m", "--stage", "data.tar", "--wheels", "my wheels")
    train = ("--", "train", "tasks/mine.py", "epochs=1", "pause=0", "--plan", f"{PLAIN},replicate=2")
    (tmp_path / "my wheels").mkdir()
    said = grappe(*submit, *train, "--run", "run", cwd=tmp_path, code=2)
    assert "the wheels of mine lack a package, and nothing was submitted:\n  extra: there is none" in said
    assert not (tmp_path / "run").exists()
    wheel(tmp_path / "my wheels", "extra", "1.0", files={"extra.py": "NAME = 'extra'"})
    for number, doctor in ((1, ()), (2, ("--no-doctor",))):
        local = tmp_path / f"local-{number}"
        monkeypatch.setenv("NODE_LOCAL", str(local))
        grappe(*submit, *doctor, *train, "--run", f"run-{number}", cwd=tmp_path)
        grappe("wait", f"run-{number}", cwd=tmp_path)
        assert "has extra" in grappe("logs", f"run-{number}", cwd=tmp_path)
        assert (local / "data" / "images").read_text() == "data"
        assert Run(tmp_path / f"run-{number}").read_description()["data"] == str(local / "data")
        (tmp_path / "my wheels" / "extra-1.0-py3-none-any.whl").touch()  # the same content
    kept = list((tmp_path / ".environments").iterdir())
    assert len(kept) == 1, kept
    made = [next((tmp_path / f"local-{number}").glob(f"grappe-*/{kept[0].stem}")) for number in (1, 2)]
    configurations = [(one / "pyvenv.cfg").read_text() for one in made]
    assert configurations[0] == configurations[1], "the second was made anew"


OWN = """
import os, signal, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo", init_method="env://")
total = torch.tensor(dist.get_rank() + 1)
dist.all_reduce(total)
names = ("SLURMD_NODENAME", "LOCAL_RANK", "OMP_NUM_THREADS")
print("total", total.item(), *sys.argv[1:], *(os.environ[name] for name in names), flush=True)
dist.destroy_process_group()
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    sys.exit(75)
"""


def test_a_script_of_ones_own(cluster: Cluster, tmp_path: Path) -> None:
    """Processes on two nodes that meet as under torchrun; one that ends with 75 goes back into the queue."""
    (tmp_path / "mine.py").write_text(OWN)
    words = ("--nodes", "2", "--processes", "2", "--gpus", "0", "--", "python", "mine.py", "--lr", "a b")
    folder, text = waited(submit(*words, cwd=tmp_path), tmp_path)
    assert text.count("0: total 3 --lr a b n0 0 1") == 2, text
    assert text.count("1: total 3 --lr a b n1 0 1") == 2, text
    assert text.count("back into the queue") == 1, text
    script = (folder / "logs" / "submit-1.sh").read_text()
    assert "#SBATCH --signal" in script
    assert "--gres" not in script


def test_another_command(cluster: Cluster, tmp_path: Path) -> None:
    """A training submitted, then its evaluation: one task for each process, as the plan says."""
    run = ("train", "digits", "epochs=1", "--run", "run", "--plan", PLAIN)
    grappe(*run, cwd=tmp_path)
    expected = grappe("evaluate", "run", "--json", "--plan", PLAIN, cwd=tmp_path)
    words = ("--", "evaluate", "run", "--json", "--plan", f"{PLAIN},replicate=2")
    _, log = waited(submit(*words, cwd=tmp_path), tmp_path)
    found = [line for line in log.splitlines() if "{" in line]
    assert len(found) == 1, found
    scores = json.loads(found[0].partition(": ")[2])
    assert scores["loss"] == pytest.approx(json.loads(expected)["loss"], rel=1e-5)
