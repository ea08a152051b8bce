"""Unknown commands, options and arguments are answered with what to type instead."""

from pathlib import Path

import pytest
from cyclopts import CycloptsError

from grappe.cli.commands import app
from grappe.cli.corrections import COMMANDS, PLAN_WORDS, corrected
from grappe.errors import UsageError
from grappe.finder import find, make
from grappe.plan import Plan
from grappe.training.run import Run
from tests.training.test_training import train


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("train digits --epochs 3", "grappe train digits epochs=3"),
        ("train digits --lr=0.2", "grappe train digits lr=0.2"),
        ("train --batch-size 32 digits", "grappe train digits batch_size=32"),
        ("train digits --batchsize 32", "did you mean batch_size=…?"),
        ("train digits --with_optimizer", None),
        ("train digits --evaluate-evry 3", "did you mean --evaluate-every?"),
        ("train digits --qqq 1", "there is no option --qqq: grappe train --help lists them"),
        ("train digits --resume runs/a", "to resume a run, give its folder: grappe train digits --run runs/a"),
        ("train digits --run a --resume", "to resume a run, give its folder: grappe train digits --run a"),
        ("train digits --resume --run=a lr=1", "to resume a run, give its folder: grappe train digits lr=1 --run a"),
        ("train digits --checkpoint a.pt", "grappe train digits --from a.pt"),
        ("train digits --replicate 2", "grappe train digits --plan replicate=2"),
        ("train digits --gpus 4 --plan precision=bf16", "grappe train digits --plan precision=bf16,replicate=4"),
        ("train digits --nproc_per_node=4", "grappe train digits --plan replicate=4"),
        ("train digits --amp", "grappe train digits --plan precision=bf16"),
        ("train digits --amp lr=0.2", "grappe train digits lr=0.2 --plan precision=bf16"),
        ("train --ddp digits", "grappe train digits --plan replicate=2"),
        ("train --recompute digits", "grappe train digits --plan recompute"),
        ("train digits --plan=shard=2 --amp", "grappe train digits --plan shard=2,precision=bf16"),
        ("runs --epochs 3", "there is no option --epochs: grappe runs --help lists them"),
        ("resume", "give its folder: grappe train TASK --run RUN"),
        ("trian digits", "grappe train does that"),
        ("--install-completion", 'eval "$(grappe completion bash)"'),
        ("resume runs/a", "grappe train TASK --run runs/a"),
        ("train digits --learning-rate 0.1", "grappe train digits lr=0.1"),
        ("train digits --max-epochs=3", "grappe train digits epochs=3"),
        ("train digits -b 32", "grappe train digits batch_size=32"),
        (
            "train digits --epochs 3 --gpus 2 --fp16 --checkpoint-dir runs/x",
            "have no dashes: grappe train digits --run runs/x epochs=3 --plan replicate=2,precision=fp16",
        ),
        ("train digits --epochs 3 --qqq 1", "have no dashes: grappe train digits --qqq 1 epochs=3"),
        ("train digits --cpu", "grappe train digits --plan device=cpu"),
        ("train digits --wandb", "grappe train digits --log wandb"),
        ("train digits --dry-run", "grappe train digits --smoke"),
        ("train digits --output-dir x", "grappe train digits --run x"),
        ("train digits --strategy ddp", "--plan replicate=2 (DDP) or --plan shard=2 (FSDP)"),
        ("train --task digits epochs=3", "TASK has no dashes: grappe train digits epochs=3"),
        ("evaluate --run runs/a --split test", "RUN has no dashes: grappe evaluate runs/a --split test"),
        ("zzz", "there is no command 'zzz': grappe help all lists them"),
        ("evaluate runs/a runs/b", "'runs/b' is more than grappe evaluate takes"),
        ("wait", "RUN is missing"),
        ("tune --show runs/study", "grappe tune --study runs/study --dry-run"),
        ("tune digits --time 3h lr=0.1..1", "grappe tune digits --job-time 3h lr=0.1..1"),
        ("measure digits --show --site narval", "grappe measure digits --dry-run --site narval"),
        ("measure digits --batch-size 32,64", "grappe measure digits batch_size=32,64"),
        ("runs --base mine", "grappe runs --runs mine"),
        ("doctor --folder mine", "grappe doctor --runs mine"),
        ("export run --to new", "grappe export run --out new"),
        ("export run", "--out is missing"),
        ("verify digits --html a.html", "grappe verify digits --out a.html"),
        ("train digits --watch a.py:B", "grappe train digits --callback a.py:B"),
    ],
)
def test_the_answer_says_what_to_type(typed: str, answer: str | None) -> None:
    words = typed.split()
    if answer is None:  # the parser takes underscores for dashes
        app.parse_args(words, exit_on_error=False, print_error=False)
        return
    assert answer in answer_to(words)


def answer_to(words: list[str]) -> str:
    with pytest.raises(CycloptsError) as refused:
        app.parse_args(words, exit_on_error=False, print_error=False)
    return str(corrected(refused.value, words, app))


@pytest.mark.slow
def test_the_answer_resumes_the_run_with_its_fields_and_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from grappe.tasks.digits import Digits\nclass Mine(Digits):\n    epochs: int = 9\n"
    )
    train(tmp_path / "a", f"{tmp_path}/mine.py", steps=2)  # type: ignore[arg-type]
    fields = "batch_size=64 lr=0.1 momentum=0.9 lr_scaling=none"
    answer = answer_to(["train", "--resume", "a", "epochs=1"])
    assert answer.endswith(f"grappe train {tmp_path}/mine.py {fields} epochs=1 --plan threads=1 --run a")
    for typed in ("train --run a", "resume a"):
        assert f"grappe train {tmp_path}/mine.py epochs=9 {fields} --plan threads=1 --run a" in answer_to(typed.split())
    assert " mine.py " in answer_to(["train", "mine.py", "--resume", "a"])
    (tmp_path / "a/checkpoints").rename(tmp_path / "kept")
    assert "a has no checkpoint: to start it again from step 0: grappe train " in answer_to(["resume", "a"])
    (tmp_path / "kept").rename(tmp_path / "a/checkpoints")
    app(answer.partition("grappe ")[2].split(), exit_on_error=False, print_error=False)
    assert (Run("a").is_finished(), Run("a").read_description()["restarts"]) == (True, 1)
    answer = answer_to(["train", "--resume", "a", "epochs=3"])
    assert "a is finished: " in answer and answer.endswith("--plan threads=1 --from a")


def test_each_command_and_plan_that_is_suggested_exists() -> None:
    for typed, command in COMMANDS.items():
        assert command in app and typed not in app
        assert f"grappe {command} does that" in answer_to([typed])
    for words in PLAN_WORDS.values():
        Plan.parse(words.format(2))


@pytest.mark.parametrize(
    ("field", "answer"),
    [
        ("replicate", "replicate is a key of the plan, not a field of the task: --plan replicate=2"),
        ("epoch", "did you mean epochs"),
    ],
)
def test_a_field_that_the_task_has_not(field: str, answer: str) -> None:
    with pytest.raises(UsageError, match=answer):
        make(find("digits"), {field: "2"})


def test_a_key_of_the_plan_without_a_value() -> None:
    with pytest.raises(UsageError, match="shard needs a value, a whole number: shard=…"):
        Plan.parse("replicate=2,shard")
