"""The tables of docs/from-a-page.md: every command that stands in a cell "here" is run, or at least parsed."""

import dataclasses
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from grappe import engines
from grappe.cli.commands import app
from grappe.errors import PlanError
from grappe.plan import STRATEGIES, Plan

GUIDE = Path(__file__).parents[2] / "docs" / "from-a-page.md"
ROW = re.compile(r"^\| (.+?) \| (.+) \|$", re.MULTILINE)
COMMAND = re.compile(r"`grappe ([^`]+)`")
CPU = ",threads=1,device=cpu,workers=0"


def commands() -> list[str]:
    """The whole commands of the cells: those with "…" and with options alone are not."""
    cells = [here for _, here in ROW.findall(GUIDE.read_text())]
    found = [one for cell in cells for one in COMMAND.findall(cell) if " " in one and "…" not in one]
    return sorted(set(found), key=found.index)


def of(*words: str) -> list[str]:
    return [one for one in commands() if one.startswith(words)]


TRAINED = [one for one in of("train digits") if not re.search("RUN|engine=lightning|wandb", one)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    app(["train", "digits", "--steps", "2", "--plan", CPU[1:], "--run", str(folder)])
    return folder


def test_the_tables_have_commands() -> None:
    assert len(of("submit")) > 18
    assert len(TRAINED) >= 2


@pytest.mark.parametrize("command", of("submit"))
def test_jobs_are_shown(command: str, here: Path, capsys) -> None:
    words = shlex.split(command)
    for script in [word for word in words if word.endswith(".py")]:
        (here / script).write_text("print(1)\n")
    if "--dry-run" not in words:
        words.insert(1, "--dry-run")
    assert app(words) == 0
    said = capsys.readouterr().out
    site = words[words.index("--site") + 1]
    account = words[words.index("--account") + 1]
    assert f"--account={account}" in said
    if "jean-zay" in site:
        assert "--hint=nomultithread" in said
        assert re.search(r"--gres=gpu:(4|8)", said)


@pytest.mark.parametrize("guide", [GUIDE, GUIDE.parent / "fr" / GUIDE.name], ids=["en", "fr"])
def test_what_the_page_has_since_2026_is_found(guide: Path) -> None:
    pages = "\n".join(page for page, _ in ROW.findall(guide.read_text()))
    for name in (
        "2.5.1", "torch.compile(Net())", "pin_memory=True", "OMP_NUM_THREADS", "wget", "h100_1g.10gb",
        "--array=", "r/4.5", "deepspeed-example.sh", "config_env.sh", "launch_training_deepspeed.sh",
        "pytorch-deepspeed.py", "ds_config.json", "cuda/VERSION", "Fully Sharded Data Parallelism",
        "Tensor Parallelism", "Pipeline Parallelism", "bundles",
    ):  # fmt: skip
        assert name in pages, name


def test_the_script_of_deepspeed_gets_the_pages_resources(here: Path, capsys) -> None:
    (here / "pytorch-deepspeed.py").write_text("import deepspeed\n")
    [kept] = [one for one in of("submit") if "pytorch-deepspeed.py" in one]
    assert app(["submit", "--dry-run", *shlex.split(kept)[1:]]) == 0
    said = capsys.readouterr().out
    assert "#SBATCH --nodes=2\n" in said and "#SBATCH --gpus-per-node=a100:2\n" in said
    assert "module load python/3.11 cuda/12.6\n" in said
    assert "pytorch-deepspeed.py --deepspeed_config=ds_config.json" in said


def test_the_pages_resources_are_asked_for(here: Path, capsys) -> None:
    four = next(one for one in of("submit") if "pipeline=2,microbatches=8,replicate=4" in one)
    app(["submit", "--dry-run", *shlex.split(four)[1:]])
    said = capsys.readouterr().out
    assert "#SBATCH --nodes=2\n" in said
    assert "gpus-per-node=a100:4" in said


@pytest.mark.parametrize("command", TRAINED)
def test_trainings_train(command: str, here: Path, capfd) -> None:
    words = shlex.split(command)
    if "--plan" in words:
        words[words.index("--plan") + 1] += CPU
    else:
        words += ["--plan", CPU[1:]]
    assert app([*words, "--steps", "2", "--run", "run"]) == 0
    assert "2 steps" in capfd.readouterr().out


@pytest.mark.parametrize("command", [one for one in commands() if re.search("RUN$", one)])
def test_commands_about_a_run(command: str, run: Path, here: Path, capfd) -> None:
    words = shlex.split(command.replace("RUN", str(run)))
    if words[0] == "logs":
        (run / "logs").mkdir(exist_ok=True)
        (run / "logs" / "job-1.out").write_text("hello\n")
    if words[0] in ("train", "evaluate"):
        words += ["--plan", CPU[1:]]
    if words[0] == "train":
        words += ["--steps", "2"]
    assert app(words) == 0


@pytest.mark.parametrize("command", sorted({*commands()} - {*of("submit"), *TRAINED}))
def test_commands_that_are_tested_elsewhere_are_parsed(command: str) -> None:
    app.parse_args(shlex.split(command), print_error=False, exit_on_error=False)


PLAN = r"([a-z_]+(?:=[\w:$.]+)?(?:,[a-z_]+(?:=[\w:$.]+)?)*)"


def plans() -> list[str]:
    """Lists what stands after --plan in the cells, and keys with their values that stand alone there."""
    cells = " ".join(here for _, here in ROW.findall(GUIDE.read_text()))
    keys = {field.name for field in dataclasses.fields(Plan)}
    alone = [text for text in re.findall(f"`{PLAN}`", cells) if "=" in text and "N" not in text]
    after = re.findall(rf"--plan '?{PLAN}(?![\w=])", cells)
    return sorted({*after, *(text for text in alone if text.partition("=")[0] in keys)})


def test_every_plan_of_a_row_is_one_that_its_engine_takes() -> None:
    assert len(plans()) > 25
    for text in plans():
        plan = Plan.parse(text)
        assert plan.changed_keys() - {"engine"} <= engines.find(plan.engine).supported_keys, text
        if plan.engine == "horovod" and importlib.util.find_spec("horovod") is None:
            continue  # the reason is then that it is not built here
        assert "$" in plan.offload or engines.find(plan.engine).unsupported_reason(plan) is None, text


def test_a_strategy_offloads_only_if_its_name_says_so() -> None:
    """The scripts of deepspeed_stage_3 keep all on the GPUs."""
    for name in STRATEGIES:
        with pytest.raises(PlanError) as refusal:
            Plan.parse(name)
        assert ("offload=" in str(refusal.value)) is ("offload" in name), name
    for page, here in ROW.findall(GUIDE.read_text()):
        if ("stage_3" in page and "offload" not in page) or page.startswith("`deepspeed-stage3.sh"):
            assert "offload" not in here, here
