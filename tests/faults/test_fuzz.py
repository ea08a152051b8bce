"""The fuzzer: whatever is on the command line, in a run, in a task's outputs, in a site or a plan, grappe says one
message of its own or goes on; nothing runs, nothing outside is touched. GRAPPE_FUZZ=1000 tries many more."""

import contextlib
import dataclasses
import functools
import io
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from grappe import engines, sites
from grappe.cli import commands
from grappe.cli.commands import app
from grappe.cli.exit import BUG
from grappe.contrib.slurm import jobs
from grappe.contrib.slurm.commands import read_submission
from grappe.contrib.slurm.script import render
from grappe.errors import GrappeError
from grappe.fields import parse, split
from grappe.launch.safe_console import SafeConsole
from grappe.plan import Plan
from grappe.sites.layout import fit, layout
from grappe.sites.sbatch import JobOptions
from grappe.training.run import Run, all_runs
from grappe.training.task_reference import TaskReference
from grappe.verbs import follow, prune, runs
from grappe.verbs.catalogue import site_facts, site_list
from grappe.verbs.follow import write_csv
from grappe.verbs.load import load
from grappe.verbs.predict.predict import as_json, predict
from grappe.verbs.report.report import gather, html
from tests.contrib.slurm.golden import script
from tests.faults.fuzz import DAMAGE, ESCAPES, JSON, NUMBERS, TEXTS, damage, evaluated, fuzzed, told
from tests.parity.tasks import Images
from tests.patience import PATIENCE_SECONDS
from tests.training.test_training import train

ENDINGS = (0, 2)


class Enough(Exception):
    """Ends what would wait for a run to go on."""


def hangs(number: int, frame: object) -> None:
    raise AssertionError("it hangs")


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """An empty folder to be in, another beside it that must stay as it is, and a clock that ends what hangs."""
    before = Path.cwd(), os.environ.get("XDG_CONFIG_HOME"), signal.signal(signal.SIGALRM, hangs)
    with tempfile.TemporaryDirectory(prefix="grappe-fuzz-") as folder:
        base = Path(folder)
        (base / "here").mkdir()
        (base / "outside").mkdir()
        (base / "outside/kept").write_text("kept")
        os.environ["XDG_CONFIG_HOME"] = str(base / "config")
        os.chdir(base / "here")
        signal.alarm(int(PATIENCE_SECONDS))
        try:
            yield base / "here"
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before[2])
            os.chdir(before[0])
            os.environ.pop("XDG_CONFIG_HOME") if before[1] is None else os.environ.update(XDG_CONFIG_HOME=before[1])
        assert [(one.name, one.read_text()) for one in (base / "outside").iterdir()] == [("kept", "kept")]
        assert sorted(one.name for one in base.iterdir() if one.name != "config") == ["here", "outside"]
        assert not list(base.rglob("ran"))


def printed(content: Any) -> None:
    stream = io.StringIO()
    SafeConsole(stream, width=200).print(content)
    assert stream.getvalue().replace("\n", "").isprintable()


# --- runs


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("fuzz") / "run", Images(), steps=2, save_every=1, log_samples=True).run


def a_while() -> Any:
    times = iter(range(3))

    def sleep(seconds: float) -> None:
        if next(times, None) is None:
            raise Enough

    return sleep


def followed(folder: Path) -> None:
    with contextlib.suppress(Enough):
        follow.follow(folder, io.StringIO(), sleep=a_while())


def live(folder: Path) -> None:
    view = follow.RunView(Run(folder))
    view.update()
    printed(view.table())


READERS = {
    "runs": lambda run: printed(runs.listing(run.parent)),
    "runs RUN": lambda run: printed(runs.describe(run)),
    "curves": lambda run: write_csv([run], io.StringIO()),
    "follow": followed,
    "live": live,
    "logs": lambda run: list(jobs.lines(run)),
    "report": lambda run: html(gather([run]), "title"),
    "prune": lambda run: prune.table(prune.prune(all_runs(run.parent), 1), dry_run=False),
    "load": lambda run: load(run, Images()),
    "predict": lambda run: list(predict(run, "validation", task=Images(), data=run.parent)),
    "evaluate": lambda run: evaluated(run, TaskReference.of(Images()), run.parent),
    "from": lambda run: train_from(run),  # noqa: PLW0108 - it is defined below
    "train": lambda run: train(run, Images(), steps=1),
}


def train_from(run: Path) -> None:
    from grappe.checkpoint.initial import take_over

    take_over(Images().model(), run)


@given(todo=DAMAGE, sealed=st.booleans())
@fuzzed(6)
def test_damaged_runs(made: Path, todo: list, sealed: bool) -> None:
    with workplace() as here:
        shutil.copytree(made, here / "runs/run", symlinks=True)
        damage(here / "runs/run", here.parent / "outside", todo, sealed=sealed)
        for name, verb in READERS.items():
            said = told(functools.partial(verb, here / "runs/run"))
            assert BUG not in said, name


# --- the command line

TYPED = """
digits runs runs/none epochs=2 lr=nan --plan replicate=2 --run --data --json --out --runs --keep --split test --from
--dry-run --site narval --time 1h --gpus 4 --nodes --account def-me --queue -- train -x --debug --help --rank -n -p
--chain --name --env --wheels --stage --callback --log validation 0 -1 1e400
"""
WORDS = st.one_of(TEXTS, st.sampled_from(TYPED.split()))
READING = "runs evaluate predict prune tasks engines report curves logs sites follow cancel wait trian"


@given(command=st.sampled_from([*READING.split(), ""]), words=st.lists(WORDS, max_size=5))
@fuzzed(60)
def test_command_lines(command: str, words: list[str]) -> None:
    _ended([command, *words])


@given(words=st.lists(WORDS, max_size=7), job=st.lists(WORDS, max_size=5))
@fuzzed(20)
def test_submissions(words: list[str], job: list[str]) -> None:
    _ended(["submit", "--dry-run", "--site", "narval", *job, "--", "train", *words])
    told(lambda: read_submission(("train", *words), JobOptions(), app))


def _ended(arguments: list[str]) -> None:
    if any("\0" in word for word in arguments):  # which no command line can hold
        return
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    with (
        workplace(),
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr("sys.argv", ["grappe", *arguments])
        patch.setenv("PATH", "/nowhere")  # no Slurm
        with pytest.raises(SystemExit) as end:
            commands.main()
    for stream in (out, err):
        stream.flush()
    said = "".join(stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    assert end.value.code in ENDINGS, said
    assert "Traceback" not in said or "--debug" in arguments
    assert BUG not in said
    assert said.replace("\n", "").replace("\t", "").isprintable(), ascii(said)


# --- plans and fields

KEYS = [field.name for field in dataclasses.fields(Plan)]
NAMED = "1 2 4 8 cpu native deepspeed lightning textbook horovod bf16 fp16 1f1b zero_bubble sync nvme:/tmp true"
VALUES = st.one_of(TEXTS, NUMBERS.map(str), st.sampled_from(NAMED.split()))
PLANS = st.one_of(TEXTS, st.lists(st.builds("{}={}".format, st.sampled_from(KEYS), VALUES), max_size=5).map(",".join))


@given(text=PLANS, nodes=st.none() | st.integers(-1, 5), gpus=st.none() | st.integers(-1, 10**6))
@fuzzed(50)
def test_plans(text: str, nodes: int | None, gpus: int | None) -> None:
    with contextlib.suppress(GrappeError):
        plan = Plan.parse(text)
        assert Plan.parse(str(plan)) == plan
        told(lambda: engines.check(plan))
        told(lambda: plan.check_fits(nodes or 1))
        request = JobOptions(nodes=nodes, account="def-a")
        told(lambda: fit(plan, gpus))
        for name in ("narval", "jean-zay-h100", "trillium"):
            told(functools.partial(layout, plan, sites.find(name), request))


@given(
    texts=st.lists(
        st.one_of(TEXTS, st.builds("{}={}".format, st.sampled_from(["epochs", "lr", "rule", "clip"]), VALUES))
    )
)
@fuzzed(100)
def test_fields(texts: list[str]) -> None:
    told(lambda: Images(**parse(Images, split(texts), "task Images")))


# --- sites

GOOD = {
    "title": '"Mine"',
    "source": '"https://example.org"',
    "date": "2026-11-20",
    "node": '{gpus = 4, gpu = "A100", cores = 64}',
    "ask": '{gpus = "--gres=gpu:{gpus}"}',
}
PARTS_OF_SITES = """
detect sources unconfirmed job queue probe retired node.gpus node.memory_gb ask.options ask.max_hours ask.accounts
ask.part_nodes job.modules job.variables job.local job.environment job.mps detect.X unconfirmed.node sources.ask
like slice charge note ask.max_gpus_of ask.gpu_cores charge.unit charge.gpu job.proxy
"""
SITE_KEYS = [*GOOD, *PARTS_OF_SITES.split()]


def toml(value: Any) -> str:
    """A value as TOML writes it, nearly: what is no TOML is a case, too."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            inner = "".join(c if c.isalnum() or c in " -_=./{}$!:[]" else f"\\U{ord(c):08x}" for c in value)
            return f'"{inner}"'
        case dict():
            return "{" + ", ".join(f"{toml(str(name))} = {toml(one)}" for name, one in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(toml, value)) + "]"
    return str(value)[:6000]


@given(changes=st.dictionaries(st.sampled_from(SITE_KEYS), JSON, max_size=3), extra=st.binary(max_size=20))
@fuzzed(30)
def test_sites(changes: dict[str, Any], extra: bytes) -> None:
    with workplace() as here:
        folder = sites.own_folder()
        folder.mkdir(parents=True)
        lines = [f"{key} = {value}" for key, value in GOOD.items() if key not in changes]
        for key, value in changes.items():
            with contextlib.suppress(ValueError):  # integers of thousands of digits
                lines.append(f"{key} = {toml(value)}")
        (folder / "mine.toml").write_bytes("\n".join(lines).encode(errors="surrogateescape") + extra)
        printed(site_list())
        with contextlib.suppress(GrappeError):
            mine = sites.find("mine")
            printed(site_facts("mine"))
            text = render(_with(mine))
            expected = render(script(sites.find("narval"), "1-node"))
            assert text.isprintable() or text.replace("\n", "").isprintable()
            assert text.count("$(") == expected.count("$(")
        assert here.is_dir()


def _with(site: sites.Site) -> Any:
    return dataclasses.replace(script(sites.find("narval"), "1-node"), site=site)


# --- a task's outputs

SHAPES = st.lists(st.integers(0, 4), max_size=3)
DTYPES = st.sampled_from(
    [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]
)
TENSORS = st.builds(lambda shape, dtype: torch.ones(shape).to(dtype), SHAPES, DTYPES)
OUTPUTS = st.one_of(
    TENSORS,
    TENSORS.map(lambda one: one.to_sparse()),
    TENSORS.map(lambda one: one.to("meta")),
    st.sampled_from([None, "text", 5, float("nan"), object(), [], (), {}, ESCAPES]),
    st.lists(TENSORS, max_size=2),
    st.dictionaries(TEXTS, TENSORS, max_size=2),
    st.just("honest"),
    st.just("raise"),
)
NOW: dict[str, Any] = {}


def given_now(part: str, honest: Any) -> Any:
    found = NOW.get(part, "honest")
    if isinstance(found, str) and found == "raise":
        raise RuntimeError(ESCAPES)
    return honest if isinstance(found, str) and found == "honest" else found


class Says(nn.Module):
    """A model whose output is what `NOW` has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * 8 * 8, 5)

    def forward(self, x: Any) -> Any:
        return given_now("output", self.layer(x.flatten(1)))


class Odd(Images):
    """A task each of whose methods may give anything."""

    def model(self) -> Any:
        return given_now("model", Says())

    def data(self, split: str, folder: Path) -> Any:
        return given_now("data", super().data(split, folder))

    def loss(self, output: Any, target: Any) -> Any:
        return given_now("loss", super().loss(output, target))

    def optimizer(self, named_parameters: Any) -> Any:
        return given_now("optimizer", super().optimizer(list(named_parameters)))

    def metrics(self) -> Any:
        return given_now("metrics", {})

    def units(self, model: Any) -> Any:
        return [model]


PARTS = ("output", "model", "data", "loss", "optimizer", "metrics")


@given(now=st.dictionaries(st.sampled_from(PARTS), OUTPUTS, min_size=1, max_size=2))
@fuzzed(12)
def test_what_a_task_gives(now: dict[str, Any]) -> None:
    with workplace() as here:
        NOW.clear()
        made = train(here / "run", Odd(epochs=1), steps=1).run
        NOW.update(now)
        try:
            for verb in (
                lambda: train(here / "other", Odd(epochs=1), steps=1),
                lambda: list(map(as_json, predict(made, "validation", task=Odd(), data=here))),
                lambda: evaluated(made, TaskReference.of(Odd()), here),
            ):
                told(verb)
        finally:
            NOW.clear()
