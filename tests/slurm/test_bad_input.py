"""Wrong submissions: one message each, with the fix, before anything waits in a queue."""

from pathlib import Path

import pytest

from grappe.cli import commands
from grappe.errors import GrappeError
from tests.commands import SLOW
from tests.slurm.cluster import Cluster

HERE = ("--account", "def-x", "--env", "here")
TRAIN = ("--", "train", SLOW)


def refused(*words: str) -> str:
    with pytest.raises(GrappeError) as refusal:
        commands.app(["submit", *words], exit_on_error=False, print_error=False)
    assert refusal.value.exit_code == 2
    return str(refusal.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--site", "narvall", *TRAIN), "did you mean narval"),
        (("--site", "narval", *TRAIN), "needs an account"),
        (("--site", "narval", "--account", "def-x", "--time", "soon", *TRAIN), "give seconds, or a time like"),
        (("--site", "narval", "--account", "def-x", "--gpus", "a", *TRAIN), "give whole numbers"),
        (("--site", "narval", "--account", "def-x", "--name", "$(touch hacked)", *TRAIN), "--name="),
        (("--site", "narval", "--account", "def-x", *TRAIN, "--run", "a;touch hacked"), "--run"),
        (("--site", "narval", "--account", "def-x", *TRAIN, "epocs=3"), "did you mean epochs"),
        (("--site", "narval", *HERE, *TRAIN, "--plan", "engine=textbook,shard=2"), "engine=textbook has no shard"),
        (("--site", "narval", "--account", "def-x", "--stage", "no.tar", *TRAIN), "no such archive"),
        (("--site", "narval", "--account", "def-x", "--env", "nowhere", *TRAIN), "no bin/python in it"),
        (("--site", "narval", "--account", "def-x", "--", "evaluate", "x"), "x is not a run"),
        (("--site", "narval", "--account", "def-x"), "grappe submit --time 3h -- train TASK"),
        (("--site", "narval", *HERE, "--", "trian", "x"), "grappe has no command 'trian'"),
        (("--site", "narval", *HERE, "--", "queue"), "is for the login node"),
        (("--site", "narval", *HERE, "--", "torchrun", "x.py"), "leave torchrun out"),
        (("--", "torchrun", "--nproc-per-node=2", "x.py", "--lr", "1"), "--processes 2 -- x.py --lr 1"),
        (("--", "srun", "-n", "8", "python", "x.py"), "--processes 8 -- x.py"),
        (("--", "accelerate", "launch", "--num_processes", "3", "x.py"), "--processes 3 -- x.py"),
        (("--site", "narval", *HERE, "--", "none.py"), "there is no script none.py"),
        (("--site", "narval", *HERE, "--processes", "2", *TRAIN), "from its plan: --plan replicate=2"),
        (("--site", "narval", *HERE, "--processes", "3", "--gpus", "2", "--", SLOW), "do not share 2 GPUs"),
        (("--site", "narval", *HERE, "--", "verify", SLOW, "--plan", "replicate=8"), "processes on one node"),
        (("--site", "narval", *HERE, "--sbatch", "--wrap=x", *TRAIN), "grappe sets --wrap by itself"),
        (("--site", "narval", *HERE, "--queue", "x", "--qos", "y", *TRAIN), "give one of them"),
        (("--site", "jean-zay-a100", "--account", "x@a100", "--gpus", "0", *TRAIN), "accounts of jean-zay-cpu"),
        (("--site", "narval", *HERE, *TRAIN, "--plan", "engine=deepspeed,offload=nvme:"), "names no folder"),
        (("--site", "narval", *HERE, *TRAIN, "--data", "$SLURM_PROCID"), "another for each process"),
        (("--site", "narval", *HERE, "--with", "x", *TRAIN), "--env virtualenv"),
        (("--site", "narval", "--account", "def-x", "--with", "x;y", *TRAIN), "--with x;y"),
        (("--site", "narval", *HERE, "--modules", "$(x)", *TRAIN), "not the name of a module"),
    ],
)
def test_wrong_submissions(words: tuple[str, ...], said: str, cluster: Cluster, here: Path) -> None:
    assert said in refused(*words)
    assert not list(here.iterdir())


def test_no_slurm_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no Slurm here: sinfo is not on the PATH" in refused("--site", "generic", *TRAIN)


def test_more_gpus_than_there_are(cluster: Cluster, here: Path) -> None:
    said = refused("--site", "generic", *TRAIN, "--plan", "replicate=12")
    assert "the plan needs 12 GPUs on 3 nodes, generic has 2 with 4 each (8 in all)" in said
    assert "did you mean" in refused("--site", "generic", "--queue", "gpuu", *TRAIN)
    said = refused("--site", "generic", "--time", "8d", *TRAIN)
    assert "at most 168 h" in said
