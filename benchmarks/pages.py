"""The scripts of the Alliance's PyTorch page for several processes, against the grappe plans that replace them.

    python -m benchmarks.pages [ddp lightning horovod pipeline deepspeed]

Each is started as the page starts it, with what srun would tell its processes: no Slurm is needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import cifar_files, commands
from benchmarks.commands import TORCHVISION
from benchmarks.figures import machine, spread, table
from benchmarks.rotation import free_port

HERE = Path(__file__).parent
PROCESSES, BATCH, PER_FILE = 2, 512, 4096  # 20,480 images: whole batches, as torch's pipelines want them
HEAD = ("", "images/s", "over the script", "whole command, s", "over the script")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """A script, how it is started, and what replaces it."""

    script: str
    title: str
    arguments: tuple[str, ...]
    """{port} is one that is free."""
    task: str
    """Of grappe, with the script's model and optimizer."""
    fields: tuple[str, ...] = ()
    plans: tuple[str, ...]
    needs: tuple[str, ...] = ()
    """Packages."""
    horovodrun: bool = False
    """Instead of srun: built on gloo, Horovod has no other way to find its processes."""


ADAM = str(HERE / "cifar10_adam.py")
SGD = ("momentum=0.9", "weight_decay=1e-4")
MEET = ("--init_method", "tcp://127.0.0.1:{port}")
HALF = ("--batch_size", str(BATCH // PROCESSES), "--max_epochs", "1")  # the page's sizes are for a process
PAGES = {
    "ddp": Page(
        script="pytorch_ddp_test.py",
        title="DistributedDataParallel (pytorch-ddp-test.py)",
        arguments=("--dist-backend", "gloo", "--world_size", str(PROCESSES), *HALF, *MEET),
        task="cifar10",
        fields=SGD,
        plans=("replicate=2",),
    ),
    "lightning": Page(
        script="pytorch_ddp_test_pl.py",
        title="PyTorch Lightning (pytorch-ddp-test-pl.py)",
        arguments=HALF,
        task=ADAM,
        fields=("lr=0.1",),
        plans=("replicate=2", "engine=lightning,replicate=2"),
        needs=("pytorch_lightning",),
    ),
    "horovod": Page(
        script="pytorch_horovod.py",
        title="Horovod (pytorch_horovod.py)",
        arguments=HALF,
        task="cifar10",
        fields=SGD,
        plans=("replicate=2", "engine=horovod,replicate=2"),
        needs=("horovod",),
        horovodrun=True,
    ),
    "pipeline": Page(
        script="pytorch_modelpar_pipelined.py",
        title="A pipeline of two stages, 32 microbatches (pytorch-modelpar-pipelined-rpc.py)",
        arguments=("--batch_size", str(BATCH), *MEET),
        task="cifar10",
        plans=("pipeline=2,schedule=gpipe,microbatches=32", "pipeline=2,microbatches=32"),
    ),
    "deepspeed": Page(
        script="deepspeed_stage3.py",
        title="DeepSpeed's ZeRO stage 3 (deepspeed-stage3.py)",
        arguments=HALF,
        task=ADAM,
        fields=("lr=0.001",),
        plans=("shard=2", "engine=deepspeed,shard=2"),
        needs=("pytorch_lightning", "deepspeed"),
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """Time and accuracy of one training."""

    rate: float
    """Images/s of its epoch."""
    command: float
    """Seconds of the whole command: starting and ending are in it, and grappe's evaluation and checkpoints."""


SCRIPT = "the script"
Round = dict[str, Figure]  # by plan, or SCRIPT


def main() -> None:
    """Writes the files, plays the rounds, and prints a markdown table for each script."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"{', '.join(PAGES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--per-file", type=int, default=PER_FILE, help="images in each of the five files")
    parser.add_argument("--json", type=Path, help="write every round's figures here")
    parser.add_argument("--torchvision", type=Path, default=TORCHVISION, help="the folder it is installed in")
    options = parser.parse_args()
    if strangers := set(options.pages) - set(PAGES):
        parser.error(f"{strangers.pop()} is no page: {', '.join(PAGES)}")
    found: dict[str, list[Round]] = {}
    with tempfile.TemporaryDirectory(prefix="grappe-bench-") as temporary:
        folder = Path(temporary)
        cifar_files.write(folder / "data", options.per_file)
        print(f"\n## The page's scripts on {PROCESSES} processes\n")
        for name in options.pages or PAGES:
            page = PAGES[name]
            print(f"### {page.title}\n")
            if lacks := [one for one in page.needs if importlib.util.find_spec(one) is None]:
                print(f"{lacks[0]} is not installed here: use benchmarks/run.\n")
                continue
            before = machine()
            found[name] = measured(page, folder / name, folder / "data", options)
            print(f"{options.rounds} rounds of {options.per_file * len(cifar_files.TRAINING):,} images.")
            print(f"From {before}\nto {machine()}.\n\n{table(HEAD, rows(page, found[name]))}\n", flush=True)
    if options.json:
        told = {
            name: [{who: dataclasses.asdict(one) for who, one in turn.items()} for turn in turns]
            for name, turns in found.items()
        }
        options.json.write_text(json.dumps(told, indent=1))


def measured(page: Page, folder: Path, data: Path, options: argparse.Namespace) -> list[Round]:
    """Every round's figures; each begins with another contender, and a first run of each is not counted."""
    folder.mkdir()
    images = options.per_file * len(cifar_files.TRAINING)
    turns: dict[str, Callable[[str], Figure]] = {
        SCRIPT: lambda _: script(page, folder, data, images, options.torchvision),
        **{
            plan: lambda number, plan=plan: training(page, plan, folder / f"{plan}-{number}", data, images)
            for plan in page.plans
        },
    }
    return commands.rounds(turns, options.rounds, page.script, warm=True)


def script(page: Page, folder: Path, data: Path, images: int, torchvision: Path) -> Figure:
    """The page's script, one thread in each process; the slowest one's epoch by its own clock."""
    place = folder / "script"
    if not place.exists():
        place.mkdir()
        (place / "data").symlink_to(data)
    command, environment = commands.of_page(page.script, torchvision)
    extensions = Path(sys.prefix) / "torch_extensions"  # where grappe has DeepSpeed's operators compiled
    programs = Path(sys.executable).parent
    environment |= {
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(extensions)),
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
    }
    port = str(free_port())
    command += [word.format(port=port) for word in page.arguments]
    began = time.monotonic()
    if page.horovodrun:
        start = [str(programs / "horovodrun"), "--gloo", "--network-interfaces", "lo", "-np", str(PROCESSES)]
        said = [commands.output([*start, *command], place, **environment)]
    else:
        environments = [environment | of_srun(rank, port) for rank in range(PROCESSES)]
        said = commands.together(command, place, environments)
    took = time.monotonic() - began
    epochs = re.findall(r"seconds ([\d.]+)$", "\n".join(said), re.MULTILINE)
    assert len(epochs) == PROCESSES, f"not an epoch's seconds from each process in:\n{said}"
    return Figure(rate=images / max(map(float, epochs)), command=took)


def of_srun(rank: int, port: str) -> dict[str, str]:
    """Returns the variables that srun and the pages' job scripts set for a process of a job on one node."""
    processes = str(PROCESSES)
    return {
        "SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "page", "SLURM_STEP_ID": "0", "SLURM_NTASKS": processes,
        "SLURM_NTASKS_PER_NODE": processes, "SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip


def training(page: Page, plan: str, run: Path, data: Path, images: int) -> Figure:
    """`grappe train` of the same model, images and batch."""
    fields = ("network=small", f"batch_size={BATCH}", "epochs=1", "holdout=0", *page.fields)
    places = ("--plan", f"{plan},device=cpu,threads=1", "--data", str(data))
    done = commands.grappe(run.parent, run, page.task, *fields, *places)
    return Figure(rate=done.rate(images, BATCH), command=done.command)


def rows(page: Page, rounds: Sequence[Round]) -> list[list[str]]:
    """A row for the script and one for each plan; ratios are taken within a round, then their median."""

    def over(name: str, value: Callable[[Figure, Figure], float]) -> str:
        return spread([value(one[name], one[SCRIPT]) for one in rounds]).text("{:.2f}")

    found = []
    for name in (SCRIPT, *page.plans):
        rate = spread([one[name].rate for one in rounds]).text("{:,.0f}")
        took = spread([one[name].command for one in rounds]).text("{:.1f}")
        if name == SCRIPT:
            found.append([name, rate, "", took, ""])
            continue
        faster = over(name, lambda ours, theirs: ours.rate / theirs.rate)
        sooner = over(name, lambda ours, theirs: theirs.command / ours.command)
        found.append([f"grappe, `{name}`", rate, faster, took, sooner])
    return found


if __name__ == "__main__":
    main()
