"""Answers a command, an option or an argument that does not exist with what to type instead."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence

from cyclopts import App, ArgumentCollection, CycloptsError, UnknownCommandError, UnknownOptionError
from cyclopts.exceptions import MissingArgumentError, UnusedCliTokensError

from grappe.errors import GrappeError, UsageError
from grappe.fields import hints
from grappe.plan import Plan
from grappe.task import Task


def _by_word(words: Mapping[str, Sequence[str]]) -> dict[str, str]:
    return {typed: meant for meant, each in words.items() for typed in each}


COMMANDS = _by_word({
    "cancel": ("kill", "stop"), "doctor": ("diagnose", "env", "info"), "engines": ("keys", "plan", "plans"),
    "evaluate": ("eval", "test", "validate"), "fetch": ("datasets", "download"), "follow": ("watch",),
    "gpus": ("devices", "gpu"), "lr-find": ("lr", "lr_find"),
    "measure": ("bench", "benchmark", "profile", "profiler"), "predict": ("infer",),
    "prune": ("clean", "delete", "remove", "rm"), "report": ("plot", "tensorboard"),
    "runs": ("history", "list", "ls", "show", "status"), "submit": ("sbatch",),
    "tasks": ("examples", "models"), "train": ("fit", "run"), "tune": ("search", "sweep"), "verify": ("check",),
})  # fmt: skip
"""Words that people type, and the command for each."""

OPTIONS = _by_word({
    "--callback": ("watch", "watcher"), "--dry-run": ("preview", "show"),
    "--from": ("checkpoint", "ckpt", "pretrained", "weights"), "--job-time": ("time",),
    "--log tensorboard": ("tensorboard",), "--log wandb": ("wandb",), "--out": ("html", "output", "to"),
    "--run": ("checkpoint_dir", "output_dir", "save_dir"), "--runs": ("base", "folder", "history"),
    "--smoke": ("dry_run",),
})  # fmt: skip
"""Options that people type, or that once were, and the option that does it, of a command that has it."""

FIELDS = _by_word({
    "batch_size": ("b", "batch", "bs"), "epochs": ("e", "max_epochs", "num_epochs"),
    "lr": ("base_lr", "learning_rate"),
})  # fmt: skip
"""Words that people type, and the task's field for each."""

PLAN_WORDS = _by_word({
    "microbatches={}": (
        "accumulate", "accumulate_grad_batches", "gradient_accumulation", "gradient_accumulation_steps",
    ),
    "device=cpu": ("cpu", "no_cuda"), "device=cuda": ("cuda", "gpu"),
    "pipeline={}": ("pp",), "precision=bf16": ("amp", "bf16"), "precision=fp16": ("fp16",),
    "recompute": ("activation_checkpointing", "gradient_checkpointing"),
    "replicate={}": (
        "ddp", "devices", "gpus", "nproc", "nproc_per_node", "num_gpus", "num_processes", "processes", "ranks",
    ),
    "shard={}": ("fsdp",), "tensor={}": ("tp",), "workers={}": ("num_workers",),
})  # fmt: skip
"""Options that people type, and the words of a plan for each."""
SUGGESTED = re.compile(r"(?<=: grappe )(?!.*--help).*")  # the command line at the end of an answer


def corrected(error: CycloptsError, arguments: Sequence[str], app: App) -> UsageError:
    """Returns the command line's error as one line with the fix.

    Args:
        arguments: what was typed after `grappe`.
    """
    if isinstance(error, UnknownCommandError) and error.unused_tokens:
        return UsageError(_command(error.unused_tokens, [name for name in app if not name.startswith("-")]))
    if isinstance(error, UnknownOptionError) and (typed := error.token.keyword or error.token.value):
        message = unknown_option(typed, arguments, error.argument_collection)
        if line := SUGGESTED.search(message):
            words = shlex.split(line[0])
            try:
                app.parse_args(words, exit_on_error=False, print_error=False)
            except UnknownOptionError as another:  # one line mends them all
                if more := SUGGESTED.search(str(corrected(another, words, app))):
                    message = message.replace(line[0], more[0])
        return UsageError(message)
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return UsageError(
            f"'{error.unused_tokens[0]}' is more than grappe {arguments[0]} takes: grappe {arguments[0]} --help"
        )
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name = error.argument.names[0]
        older = [text for text in arguments if OPTIONS.get(text.partition("=")[0].lstrip("-")) == name]
        dashed = [text for text in arguments if text.startswith("--") and text.partition("=")[0][2:].upper() == name]
        if meant := [*dashed, *older]:
            return UsageError(unknown_option(meant[0], arguments, ArgumentCollection([error.argument])))
        if name == "TASK" and "--run" in arguments[:-1]:
            return UsageError(f"TASK is missing: {_resumed(arguments, '')}")
        if not name.startswith("-") or name not in arguments:
            return UsageError(f"{name} is missing: grappe {arguments[0]} --help")
    return UsageError(" ".join(str(error).split()))


def _command(words: Sequence[str], commands: Sequence[str]) -> str:
    typed = words[0]
    if typed in ("--install-completion", "--show-completion", "install-completion"):
        return 'for completion, add to ~/.bashrc: eval "$(grappe completion bash)"; other shells: grappe completion -h'
    if typed in ("resume", "continue", "restart"):
        return _resumed(["train", *words[2:]], [*words, "RUN"][1])
    meant = COMMANDS.get(typed) or next(iter(difflib.get_close_matches(typed, commands, n=1, cutoff=0.7)), None)
    if meant is not None:
        return f"there is no command '{typed}': grappe {meant} does that"
    return f"there is no command '{typed}': grappe help all lists them"


def unknown_option(typed: str, arguments: Sequence[str], collection: ArgumentCollection) -> str:
    """Returns the message for an option that does not exist.

    Args:
        arguments: what was typed after `grappe`.
        collection: the command's arguments and options.
    """
    options = sorted({name for argument in collection if argument.parse for name in argument.names})
    option, equals, value = typed.partition("=")
    name = option.lstrip("-").replace("-", "_")
    place = next(at for at, text in enumerate(arguments) if text.partition("=")[0] == option)
    dashed = f"--{name.replace('_', '-')}"
    exists = dashed in options
    apart = not equals and place + 1 < len(arguments) and _is_value(name, arguments[place + 1], exists)
    value = arguments[place + 1] if apart else value
    before, after = arguments[:place], arguments[place + 1 + apart :]
    rest = [*before, *after]  # the command without the option
    fields = _fields(rest) if "FIELDS" in options else frozenset[str]()
    if name.upper() in options and not exists:
        return f"{name.upper()} has no dashes: {_line([*rest[:1], *filter(None, [value]), *rest[1:]])}"
    renamed, _, chosen = OPTIONS.get(name, "").partition(" ")
    value = chosen or value
    if exists or renamed in options:
        right = [dashed if exists else renamed, value]
        if renamed == "--dry-run" and value:  # the study of tune --show STUDY
            right = ["--study", value, "--dry-run"]
        return f"there is no option {option}: {_line([*before, *filter(None, right), *after])}"
    name = name if name in fields else FIELDS.get(name, name)
    if name in fields:
        return f"{name} is a field of the task, and fields have no dashes: {_line(rest, f'{name}={value or 0}')}"
    words = PLAN_WORDS.get(name, "").format(value or 2)  # what other tools call it
    if name in Plan.__dataclass_fields__:
        words = f"{name}={value}" if value else name
    if "--plan" in options and words:
        return f"the plan sets that, not {option}: {_with_plan(rest, words)}"
    if name == "resume" and "--run" in options:
        return _resumed(rest, value)
    if name in ("accelerator", "distributed", "strategy") and "--plan" in options:
        return f"the plan sets that, not {option}: --plan replicate=2 (DDP) or --plan shard=2 (FSDP)"
    fitting = [*options, *(f"--{field}" for field in fields)]
    close = next(iter(difflib.get_close_matches(option, fitting, n=1, cutoff=0.7)), "")
    if not close:
        return f"there is no option {option}: grappe {arguments[0]} --help lists them"
    return f"there is no option {option}: did you mean {close if close in options else f'{close[2:]}=…'}?"


def _is_value(name: str, word: str, exists: bool) -> bool:
    """Returns whether the word after an option is its value, and not a field or the task."""
    key = Plan.__dataclass_fields__.get(name)
    if word.startswith("-") or ("=" in word and not exists) or (key is not None and key.type == "bool"):
        return False
    if name == "recompute":
        return word.startswith(("full", "selective", "host"))
    return name not in PLAN_WORDS or ("{}" in PLAN_WORDS[name] and word.isdigit())


def _line(rest: Sequence[str], *words: str) -> str:
    return shlex.join(["grappe", *rest, *filter(None, words)])


def _resumed(rest: Sequence[str], folder: str) -> str:
    """Returns how to resume a run: the command with the run's task, fields and plan, where no others were typed.

    Args:
        rest: the command.
        folder: the run's; "": that of its --run.
    """
    from grappe import finder
    from grappe.checkpoint.format import list_checkpoints
    from grappe.training.run import Run
    from grappe.training.task_reference import SCRIPT, texts_of

    rest = [part for text in rest for part in (text.split("=", 1) if text.startswith("--run=") else [text])]
    while "--run" in rest[:-1]:
        place = rest.index("--run")
        folder = folder or rest[place + 1]
        rest = [*rest[:place], *rest[place + 2 :]]
    folder, (command, *typed) = folder or "RUN", rest
    named = typed[:1] if typed and "=" not in typed[0] and not typed[0].startswith("-") else []
    typed = typed[len(named) :]
    try:
        run = Run(folder)
        description = run.read_description()
    except GrappeError:
        return f"to resume a run, give its folder: {_line([command, *(named or ['TASK']), *typed], '--run', folder)}"
    plan = str(description.get("plan") or "")
    if "script" in description:
        started, script = ["launch", *(["--plan", plan] if plan else [])], str(description["script"])
        if description.get("class") == SCRIPT:
            line = f"{_line(started, '--run', folder)} {script}"
            return f"to resume a run, give its folder: {line}"
        return f"{folder} is a run of a grappe.Loop: start its script again: {_line(started)} {script}"
    task = str(description.get("task", "TASK"))
    usual = texts_of({"fields": finder.defaults(finder.find(task) if task in finder.names() else Task)}) or {}
    names = {text.partition("=")[0] for text in typed}
    texts = (texts_of(description) or {}).items()
    fields = [f"{name}={text}" for name, text in texts if name not in names and usual.get(name) != text]
    planned = ["--plan", plan] if plan and not names & {"--plan", "-p"} else []
    words = [command, *(named or [task]), *fields, *typed, *planned]
    if not list_checkpoints(run.checkpoints):
        return f"{folder} has no checkpoint: to start it again from step 0: {_line(words, '--run', folder)}"
    if run.is_finished():
        return f"{folder} is finished: to train on from its weights: {_line(words, '--from', folder)}"
    return f"to resume a run, give its folder: {_line(words, '--run', folder)}"


def _with_plan(rest: Sequence[str], words: str) -> str:
    rest = [part for text in rest for part in (text.split("=", 1) if text.startswith("--plan=") else [text])]
    if "--plan" not in rest[:-1]:
        return _line(rest, "--plan", words)
    place = rest.index("--plan") + 1
    return _line([*rest[:place], f"{rest[place]},{words}".strip(","), *rest[place + 1 :]])


def _fields(rest: Sequence[str]) -> frozenset[str]:
    """Returns the fields of the task that the command names; without one that can be loaded, those of every task."""
    from grappe import finder

    common = frozenset(hints(Task))
    try:
        return common | frozenset(hints(finder.find(rest[1])))
    except (GrappeError, ImportError, IndexError):
        return common
