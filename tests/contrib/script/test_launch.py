"""grappe launch: scripts on the processes of a plan, their exit codes, and what is refused."""

import ast
import os
import signal
import sys
from pathlib import Path

import pytest

from grappe.cli.commands import app
from grappe.cli.exit import script_apart
from grappe.contrib.script.launch import ITS_OWN, imports_of, launch
from grappe.errors import EXIT_INTERRUPTED, ProcessDied, UsageError
from grappe.training.run import Run
from tests.commands import GRAPPE, Command, ran, until
from tests.contrib.script.plainly import as_it_is
from tests.launch.test_rank import two_nodes

PLAN = "replicate=2,device=cpu,threads=1"
LOOP = """
import os, signal, sys
import torch, grappe

net = torch.nn.Linear(3, 1)
data = torch.utils.data.TensorDataset(torch.ones(12, 3), torch.ones(12))
with grappe.Loop(run="run") as loop:
    net, optimizer = loop.parallelize(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for epoch in loop.epochs(2):
        for inputs, targets in loop.batches(data, 4):
            if loop.step == 1 and "stop" in sys.argv:
                os.kill(os.getpid(), signal.SIGUSR1)
            ((net(inputs) - targets[:, None]) ** 2).mean().backward()
            optimizer.step()
    print(loop.world.rank, sys.argv[1:], loop.step, flush=True)
"""
OWN = """
import os, sys
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()  # gloo may still connect the others here, and fails where one of them has left already
print(dist.get_rank(), os.environ["LOCAL_RANK"], dist.get_world_size(), __name__, flush=True)
sys.exit(3 if dist.get_rank() else 0) if "fail" in sys.argv else dist.destroy_process_group()
"""

WIKIS = """
import os
import torch.distributed as dist

ranks = {int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "SLURM_LOCALID", "SLURM_PROCID")}
sizes = {os.environ[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")}
rank = int(os.environ["SLURM_NODEID"]) * 2 + ranks.pop()
method = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
dist.init_process_group("gloo", init_method=method, world_size=2, rank=rank)
dist.barrier()
print(rank, ranks, sizes, os.environ["SLURM_JOB_NODELIST"], os.environ["SLURM_STEP_GPUS"], flush=True)
dist.destroy_process_group()
"""


def test_a_loop_gets_the_plan_is_stopped_and_goes_on(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(LOOP)
    assert launch("train.py", ["stop"], PLAN) == EXIT_INTERRUPTED
    run = Run("run")
    assert run.read_status(run.read_description()) == "interrupted"
    assert run.read_description()["processes"] == 2 and run.read_description()["task"] == "train.py"
    assert launch("train.py", ["--lr", "1"], PLAN) == 0
    assert capfd.readouterr().out == "0 ['--lr', '1'] 6\n", "process 0 alone has the terminal"
    assert [record["step"] for record in run.records("step")] == [1, 2, 3, 4, 5, 6]


def test_a_script_that_spreads_itself_is_started_as_it_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(OWN)
    assert launch(tmp_path / "own.py", [], PLAN) == 0
    said = capfd.readouterr()
    assert said.out == "0 0 2 __main__\n"
    assert "own.py uses torch.distributed: it is started as it is, on 2 processes" in said.err
    with pytest.raises(ProcessDied, match=r"process 1 of 2.*SystemExit"):
        launch(tmp_path / "own.py", ["fail"], PLAN)


def test_a_script_that_srun_starts_finds_its_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("SLURM_LOCALID", "SLURM_PROCID", "SLURM_NODEID"):  # a job's one task has these
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    (tmp_path / "wiki.py").write_text(WIKIS)
    assert launch(tmp_path / "wiki.py", [], PLAN) == 0
    assert capfd.readouterr().out == "0 set() {'2'} n1 0,1\n"


def test_the_processes_and_the_run_are_said_once_and_not_on_the_output(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text("print('mine')")
    assert launch("train.py", [], PLAN, run=Path("runs/a")) == 0
    said = capfd.readouterr()
    assert said.out == "mine\n" and said.err == "grappe: 2 processes, run in runs/a\n"
    Path("loop.py").write_text("import grappe")
    assert launch("loop.py", [], PLAN) == 0
    assert capfd.readouterr().err == "grappe: 2 processes\n"


@pytest.mark.nightly
def test_a_script_for_older_libraries_is_told_what_took_their_place(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text("from torch.distributed.pipeline.sync import Pipe")
    with pytest.raises(ProcessDied, match="pipeline=2,microbatches=8"):
        launch(tmp_path / "old.py", [], "")


@pytest.mark.parametrize(
    ("text", "its_own"),
    [
        ("from transformers import BertConfig", False),
        ("import transformers as hf\nhf.BertConfig()", False),
        ("from transformers import Trainer", True),
        ("import transformers as hf\ndef main():\n    hf.TrainingArguments('out')", True),
    ],
)
def test_models_of_transformers_are_spread_and_its_trainer_spreads_itself(text: str, its_own: bool) -> None:
    assert its_own != set(imports_of(ast.parse(text))).isdisjoint(ITS_OWN)


def test_lightnings_requeue_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_NAME", "mine")
    (tmp_path / "own.py").write_text("import os\nprint(os.environ['SLURM_JOB_NAME'])\nif 0:\n    import lightning")
    assert launch(tmp_path / "own.py", [], "device=cpu") == 0
    assert capfd.readouterr().out == "interactive\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("from", "is not a Python script"),
        (None, "No such file or directory: give a Python script"),
    ],
)
def test_what_cannot_be_launched_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    script = tmp_path / "script.py"
    if text is not None:
        script.write_text(text)
    with pytest.raises(UsageError, match=words):
        launch(script, [], PLAN)


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("launch a.py --plan x -h", "launch -- a.py --plan x -h"),
        ("launch --plan replicate=2 a.py -p 3", "launch --plan replicate=2 -- a.py -p 3"),
        ("launch -p=x -- a.py --lr 1", "launch -p=x -- a.py --lr 1"),
        ("launch --help", "launch --help"),
        ("train a.py -p x", "train a.py -p x"),
    ],
)
def test_what_follows_the_script_is_its_own(typed: str, read: str) -> None:
    assert script_apart(typed.split()) == read.split()


POOL = """
import multiprocessing, signal
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
with multiprocessing.get_context("fork").Pool(1) as pool:
    print(pool.map(abs, [-1]))


def handles(_):
    return signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


net = nn.Linear(3, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for inputs, targets in DataLoader(TensorDataset(torch.ones(8, 3), torch.ones(8, 2)), 4):
    optimizer.zero_grad()
    (net(inputs) - targets).square().mean().backward()
    optimizer.step()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        print(pool.map(handles, [0]))
"""


def test_a_scripts_pool_of_processes_ends(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("pool.py").write_text(POOL)
    assert launch("pool.py", [], PLAN) == 0, "SIGTERM, which ends a pool's workers, is not blocked"
    assert capfd.readouterr().out == "[1]\n[False]\n[False]\n", "nor handled there once the training handles it"


@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [(["--help"], 0, "--rate", ""), (["--rat"], 2, "", "usage: train.py"), ([], 1, "looks for data", "no data here")],
)
def test_a_script_that_ends_before_it_trains_ends_as_on_one_process(
    arguments: list[str], code: int, out: str, err: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(
        "import argparse, sys\nparser = argparse.ArgumentParser()\nparser.add_argument('--rate')\nparser.parse_args()\n"
        "print('looks for data')\nsys.exit('no data here')"
    )
    assert launch(tmp_path / "train.py", arguments, PLAN) == code
    said = capfd.readouterr()
    assert out in said.out and err in said.err and said.err.count("grappe:") == 1, "the start alone"


SPREAD = """
import torch
from net import Net
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(12, 4), torch.randn(12, 2)), 6)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for inputs, targets in loader:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
"""
NET = """
import torch

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 2)

    def forward(self, inputs):
        print(f"{len(inputs)} rows")
        return super().forward(inputs)
"""


def test_the_command_in_a_folder_of_its_own_spreads_a_script_too(start, tmp_path: Path) -> None:
    (tmp_path / "grappe").write_text("import sys\nfrom grappe.cli.commands import main\nsys.exit(main())\n")
    (tmp_path / "train.py").write_text(SPREAD)
    (tmp_path / "net.py").write_text(NET)
    code, out, err = start(sys.executable, "grappe", "launch", "--plan", PLAN, "train.py").end()
    assert code == 0, err
    assert out == "6 rows\n" * 2, "of all processes, in each of two batches"


def test_an_option_after_the_script_is_said_to_be_the_script_s(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()")
    assert app(script_apart(["launch", str(tmp_path / "train.py"), "--plan", "replicate=2"])) == 2
    assert "--plan after the script was the script's own option" in capfd.readouterr().err
    assert app(script_apart(["launch", str(tmp_path / "train.py"), "--run=a"])) == 2
    assert "--run after the script was the script's own option" in capfd.readouterr().err
    for own in ("add_argument('--plan'); parser.parse_args(); parser.error('no')", "parse_known_args(); exit(1)"):
        (tmp_path / "train.py").write_text(f"import argparse\nparser = argparse.ArgumentParser()\nparser.{own}")
        assert app(script_apart(["launch", str(tmp_path / "train.py"), "--plan", "replicate=2"]))
        assert capfd.readouterr().err.count("grappe:") == 1, "the start alone"


OWN_ERROR = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset


def load(path):
    return open(path)


print("looks for data")
if "file" in sys.argv:
    load("nowhere.csv")
model = torch.nn.Linear(4 if "shape" in sys.argv else 3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, (x,) in enumerate(DataLoader(TensorDataset(torch.ones(40, 3)), 4)):
    optimizer.zero_grad()
    loss = model(x).square()
    try:
        (loss if "loss" in sys.argv else loss.mean()).backward()
    except RuntimeError as error:
        raise KeyError("no gradient") from error
    optimizer.step()
    if number == 2 and "late" in sys.argv:
        raise ValueError("the disk is full")
"""


ALONE = "device=cpu,threads=1"


@pytest.mark.parametrize(
    ("how", "plan"),
    [
        ("file", PLAN),
        ("late", PLAN),
        ("loss", ALONE),
        *(pytest.param(how, PLAN, marks=pytest.mark.nightly) for how in ("shape", "loss")),
    ],
)
def test_a_script_s_own_error_is_shown_as_python_shows_it(how: str, plan: str, start, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OWN_ERROR)
    plain = ran(sys.executable, "train.py", how, cwd=tmp_path)
    code, out, err = start(GRAPPE, "launch", "--plan", plan, "train.py", how).end()
    assert (code, out) == (plain.returncode, plain.stdout) == (1, "looks for data\n"), err
    shown = err.replace('File "train.py"', f'File "{tmp_path / "train.py"}"')
    assert plain.stderr in shown
    lines = [
        line for line in plain.stderr.splitlines() if "train.py" in line or "Traceback" in line or "Error:" in line
    ]
    assert [line for line in shown.splitlines() if line in lines] == lines, "once"
    assert "src/grappe" not in err and "<frozen" not in err
    assert err.splitlines()[-1].startswith("grappe: train.py fail")


NODES = """
import os, sys, tempfile, time
import torch
from torch.utils.data import DataLoader, TensorDataset

assert not {"SLURM_PROCID", "SLURM_NODEID"} & os.environ.keys()
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(48, 4), torch.randn(48, 2)), 4, shuffle=True)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for number, (inputs, targets) in enumerate(loader):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    print(number, f"{loss.item():.3f}", flush=True)
    if number == 5:
        open("reached", "w").close()
    while number == 5 and "waits" in sys.argv and not os.path.exists("go"):
        time.sleep(0.01)
folder = os.environ["OWN"] if "own" in sys.argv else tempfile.mkdtemp()
torch.save(model.state_dict(), f"{folder}/best.pt")
model.load_state_dict(torch.load(f"{folder}/best.pt"))
print("loaded")
"""


def on_two_nodes(start, folder: Path, *words: str) -> list[Command]:
    """Starts a script as srun does on two nodes, each with a temporary folder of its own."""
    (folder / "train.py").write_text(NODES)
    own = [folder / f"node-{rank}" for rank in range(2)]
    for each in own:
        each.mkdir(exist_ok=True)
    variables = [{**two_nodes(rank), "TMPDIR": str(own[rank]), "OWN": str(own[rank])} for rank in range(2)]
    return [start(GRAPPE, "launch", "--plan", PLAN, "--run", "runs/mine", *words, **each) for each in variables]


def test_what_srun_starts_on_two_nodes_is_interrupted_and_resumes_as_one_process(start, tmp_path: Path) -> None:
    first, second = on_two_nodes(start, tmp_path, "train.py", "waits")
    until((tmp_path / "reached").exists, "it trains")
    for each in (first, second):
        os.kill(each.process.pid, signal.SIGUSR2)
    (tmp_path / "go").touch()
    assert second.end() == (0, "", "")
    code, before, err = first.end()
    assert (code, err) == (EXIT_INTERRUPTED, "grappe: 2 processes, run in runs/mine\n")
    first, second = on_two_nodes(start, tmp_path, "train.py", "waits")
    (code, after, err), other = first.end(), second.end()
    said = "grappe: 2 processes, run in runs/mine\ngrappe: runs/mine: resuming from step 7\n"
    assert (code, err, other) == (0, said, (0, "", ""))
    plain = as_it_is(NODES, tmp_path / "node-0", "waits_not")
    assert dict.fromkeys((before + after).splitlines()) == dict.fromkeys(plain.splitlines())
    assert plain.startswith(before) and plain.endswith(after)
    ends = [each.end()[::2] for each in on_two_nodes(start, tmp_path, "train.py", "waits")]
    assert ends == [(0, "grappe: runs/mine is finished: nothing to do\n"), (0, "")]
    assert sorted(each.name for each in (tmp_path / "runs").iterdir()) == ["mine"]


def test_a_file_on_a_nodes_own_disk_is_named_as_the_cause(start, tmp_path: Path) -> None:
    ends = [each.end() for each in on_two_nodes(start, tmp_path, "train.py", "own")]
    assert [code for code, _, _ in ends] == [1, 1]
    said = "".join(err for _, _, err in ends)
    assert said.count("is on the node of process 0 alone") == 1, said
    assert "best.pt" in said and ends[1][1] == ""
