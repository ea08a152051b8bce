"""Renders the batch script of a job: a pure function of the submission and of the site.

The bash parts that are the same in every script, and the quoting of words for a shell, stand at the end.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from grappe.errors import UsageError
from grappe.errors.foreign_text import printable
from grappe.plan import Plan
from grappe.sites import environment, sbatch
from grappe.sites.environment import Packages
from grappe.sites.layout import Layout
from grappe.sites.sbatch import SCRIPT, TRAIN, TUNE, JobOptions, merged
from grappe.sites.schema import GPUS, MODULE, Site

NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
ACCOUNT = re.compile(r"[\w.@+-]{1,64}", re.ASCII)
IMAGES = (".sif", ".simg")
FOLDER = re.compile(r"/[\w./@+=:,-]*", re.ASCII)
LEAST_NOTICE, MOST_NOTICE = 20, 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
    """The input of a job's script."""

    site: Site
    layout: Layout
    plan: Plan
    job: JobOptions
    """The user's options, with the job's name, absolute paths, and the length of the chain."""
    kind: str = TRAIN
    """The name of a command of grappe, or SCRIPT."""
    arguments: tuple[str, ...]
    """Arguments of grappe: train, a task, its fields and options, without --run and --data; or a script's."""
    task: tuple[str, ...]
    """The task's name and its fields, for the doctor; empty without a task."""
    run: Path
    """The run's folder, or the folder of a job that is no training."""
    folder: Path
    """The folder of submission, in which the job runs."""
    data: str
    """The folder of data; "" if the command's arguments name it."""
    python: str
    """The interpreter of the submitting command."""
    torchrun: bool = False
    """Whether each process of a script finds the variables that torchrun sets."""
    lightning: bool = False
    """Whether a script imports Lightning, whose own requeue is switched off."""
    saves: bool = True
    """Whether the processes save when they get USR2."""
    packages: Packages | None = None
    """Packages of an environment that is made on the nodes."""
    command: str = ""
    """The command that made the script, as a comment for the reader."""
    time_note: str = ""
    """The source of the time limit, likewise."""
    torch: str = ""
    """The version of torch that the job gets, likewise; "" if it is not known."""

    @property
    def name(self) -> str:
        """The job's name, by default the run's."""
        return self.job.name or self.run.name[:64]

    @property
    def environment(self) -> str:
        """The kind of environment, its folder or its image: the user's, or else the site's."""
        return self.job.env or self.site.job.environment

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules to load: the user's, or else the site's."""
        return environment.modules_of(self.site, self.job.modules, self.plan)

    @property
    def resumes(self) -> bool:
        """True if the command goes on where it was killed, as a training and a study do."""
        return self.kind in (TRAIN, TUNE)


def render(script: Script) -> str:
    """Renders the script's text.

    Raises:
        UsageError: sbatch or a shell could read a name or a path as something else.
    """
    _check(script)
    if script.job.chain:
        over = (CHAIN_END if script.resumes else CHAIN_END_SAVED).format(chain=script.job.chain)
    else:  # after a kill only what resumes is requeued
        over = (AGAIN if script.resumes else AGAIN_SAVED) + REQUEUE.format(restarts=script.job.restarts)
    sections = [
        _head(script),
        "set -u",
        f"cd -- {shlex.quote(str(script.folder))} || exit 1",
        f"run={shlex.quote(str(script.run))}",
        FINISHED + (CHAINED if script.job.chain else FRESH),
        _environment(script),
        STEPS,
        _command(script),
        _steps(script),
        over,
    ]
    return "\n\n".join(sections) + "\n"


def notice(seconds: int) -> int:
    """Returns the seconds before its end at which a job of `seconds` gets a signal."""
    return max(LEAST_NOTICE, min(MOST_NOTICE, seconds // 20))


def resource_options(site: Site, layout: Layout, account: str | None) -> list[str]:
    """Returns the options of sbatch and salloc for a layout's resources.

    Raises:
        UsageError: the account does not have the form of a name.
    """
    options = []
    if account is not None:
        if not ACCOUNT.fullmatch(account):
            raise UsageError(f"--account={account!r}: that is no account's name")
        options.append(f"--account={account}")
    options += [*site.ask.options, *(layout.queue.options if layout.queue else ())]
    options += [
        f"--nodes={layout.nodes}",
        f"--ntasks-per-node={layout.processes}",
        f"--cpus-per-task={layout.cores}",
    ]
    if layout.gpus:
        options.append(site.ask.gpus.replace(GPUS, str(layout.gpus)))
    if layout.memory_gb:
        options.append(f"--mem={layout.memory_gb}G")
    return [*options, f"--time={clock(layout.seconds)}"]


def clock(seconds: int) -> str:
    """Formats seconds for sbatch: `5400` as `01:30:00`."""
    days, rest = divmod(seconds, 86400)
    text = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{text}" if days else text


def cost(layout: Layout) -> str:
    """Describes a job's maximal cost in words."""
    if layout.gpus:
        count = layout.nodes * layout.gpus
        what = f"{count} GPU{'s' if count > 1 else ''}"
        return f"{what} for at most {clock(layout.seconds)}: {layout.gpu_hours:.3g} GPU-hours"
    cores = layout.nodes * layout.processes * layout.cores
    what = f"{cores} core{'s' if cores > 1 else ''}"
    return f"{what} for at most {clock(layout.seconds)}: {layout.core_hours:.3g} core-hours"


def check_name(name: str) -> None:
    """Raises UsageError if a job cannot have this name."""
    if not NAME.fullmatch(name):
        raise UsageError(f"--name={name!r}: letters, digits, '.', '_' and '-', 64 at most")


def _check(script: Script) -> None:
    if not FOLDER.fullmatch(str(script.run)):
        raise UsageError(
            f"the run's folder {str(script.run)!r} has characters that sbatch or a shell reads as something else: "
            "give one of letters, digits and ./_-@+=:, with --run"
        )
    check_name(script.name)
    for module in script.job.modules:
        if not MODULE.fullmatch(module):
            raise UsageError(f"--modules={module}: that is no module's name, as python/3.12 is one")
    paths = (script.folder, script.job.stage or "", script.job.wheels or "", script.python)
    for word in (*script.arguments, *script.task, *map(str, paths), script.data, script.job.env):
        if printable(word, len(word)) != word:
            raise UsageError(
                f"{word!r} has a line break or another unprintable character in it: leave it out"
            )


def _head(script: Script) -> str:
    site, layout = script.site, script.layout
    processes = layout.nodes * layout.processes
    text = f"{processes} process{'es' if processes > 1 else ''} on {layout.nodes} node{'s' if layout.nodes > 1 else ''}"
    notes = [f"Made by: {script.command}"] if script.command else []
    notes += [f"{site.title}. {text}, plan: {script.plan}" if str(script.plan) else f"{site.title}. {text}"]
    notes += [f"{cost(layout)}{f', {script.job.chain} times' if script.job.chain else ''}"]
    notes += [note for note in (script.torch, script.time_note) if note]
    notes += [f"Unconfirmed, {fact}: {why}" for fact, why in site.unconfirmed.items() if fact != "storage"]
    options = [f"--job-name={script.name}", *resource_options(site, layout, script.job.account)]
    options += [
        *([f"--signal=B:USR2@{notice(layout.seconds)}"] if script.saves else []),
        f"--output={script.run}/logs/job-%j.out",
        "--open-mode=append",
        f"--array=1-{script.job.chain}%1" if script.job.chain else "--requeue",
    ]
    options = merged(with_mps(options, site, layout, script.plan), sbatch.options(script.job))
    comments = [f"# {printable(note, 10_000)}" for note in notes]
    return "\n".join(["#!/bin/bash", *comments, *(f"#SBATCH {option}" for option in options)])


def with_mps(options: list[str], site: Site, layout: Layout, plan: Plan) -> list[str]:
    """Adds the options by which processes may share a GPU (MPS), where the plan has them share one."""
    for mps in site.job.mps if plan.per_device > 1 and layout.gpus else ():
        # a constraint of theirs takes the place of the site's
        options = [option for option in options if option.partition("=")[0] != mps.partition("=")[0]] + [mps]
    return options


def _environment(script: Script) -> str:
    """Renders the environment: modules, variables, and the Python interpreter."""
    site, kind = script.site, script.environment
    lines = []
    if kind in environment.MADE_ON_NODES:
        lines.append("# Neither the user's own packages nor those of another Python.")
        lines.append("unset PYTHONPATH PYTHONHOME\nexport PYTHONNOUSERSITE=1")
    modules = script.modules if kind in environment.MADE_ON_NODES else script.job.modules
    if modules:
        lines.append(f"module purge\nmodule load {' '.join(modules)}")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in site.job.variables.items()]
    if site.job.internet is False:
        lines.append("# Compute nodes here have no way to the internet.")
        lines.append("export WANDB_MODE=offline HF_HUB_OFFLINE=1")
    if script.job.stage is not None and script.kind != TRAIN:
        lines.append(f'export GRAPPE_DATA="{site.job.local}/data"')
    if script.plan.compile and not kind.endswith(
        IMAGES
    ):  # an image sees the run's folder, and not the one around it
        lines.append(
            "# Kernels are compiled once: a restart, on another node too, and later runs find them there."
        )
        lines.append('export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-${run%/*}/.compiled}"')
    lines.append(f"python=({_python(script, kind)})")
    lines.append('grappe=("${python[@]}" -m grappe)')
    return "\n".join(lines)


def _python(script: Script, kind: str) -> str:
    if kind == "here":
        return f"{shlex.quote(script.python)}"
    if kind in environment.MADE_ON_NODES:
        assert script.packages is not None, "what is made on the nodes is made of something"
        return f'"{environment.place(script.site.job.local, script.packages.key)}/bin/python"'
    if kind.startswith("conda:"):
        return f"conda run --no-capture-output --name {shlex.quote(kind.removeprefix('conda:'))} python"
    if kind.endswith(IMAGES):
        image = shlex.quote(kind)
        return f'"$(command -v apptainer || command -v singularity)" exec --nv --bind "$run" {image} python'
    return f"{shlex.quote(str(Path(kind) / 'bin' / 'python'))}"


def _steps(script: Script) -> str:
    """Renders the steps: prepare and examine each node, then the command; the first that fails ends the job."""
    gpus = " --gpu-bind=none" if script.layout.gpus else ""
    program = 'bash -c "$start" start "${python[@]}"' if script.kind == SCRIPT else '"${command[@]}"'
    steps = [f"run_step --label --kill-on-bad-exit=1 --wait=60{gpus} {program}"]
    if script.kind == SCRIPT:
        steps.insert(0, "meet")
    if script.job.doctor:
        task = ' "${task[@]}"' if script.task else ""
        if script.kind == SCRIPT:
            task = f" --script {literal(script.arguments[0])}"
        steps.insert(0, DOCTOR.format(task=task))
    text = ""
    if script.kind == SCRIPT:
        words = " ".join(map(expanded, script.arguments))
        variables = (TORCHRUN if script.torchrun else "") + (NO_LIGHTNING_REQUEUE if script.lightning else "")
        text = MEET + START.format(torchrun=variables, words=words)
    if once := _once(script):
        text += ONCE.format(body="\n".join(once))
        steps.insert(0, ON_EACH_NODE)
    text += " &&\n    ".join(steps) + "\ncode=$?\n"
    if script.kind == SCRIPT:
        text += FIRST
    if script.kind != TRAIN:
        text += IS_DONE
    return text + '[ ! -e "$run/done" ] || end 0\n' + FAILED


def _once(script: Script) -> list[str]:
    """Renders the preparation of every node: makes the environment, stages the data."""
    local, kind = script.site.job.local, script.environment
    commands = []
    if kind in environment.MADE_ON_NODES and script.packages is not None:
        commands.append(
            environment.made(
                script.packages,
                kind=kind,
                local=local,
                run=script.run,
                python=script.python,
                modules=bool(script.modules),
                wheels=script.job.wheels,
            )
        )
    if script.job.stage is not None:
        if not local:
            raise UsageError(f"{script.site.name} names no local scratch to stage data to: leave --stage out")
        archive = shlex.quote(str(script.job.stage))
        commands.append(f'mkdir -p "{local}/data" && tar -xf {archive} -C "{local}/data"')
    return commands


def _command(script: Script) -> str:
    lines = []
    if script.task:
        lines.append(f"task=({' '.join(command_words(script.task))})")
    lines.append(f"plan={literal(str(script.plan))}")
    if script.kind == SCRIPT:
        return "\n".join(lines)
    words = list(command_words(script.arguments))
    if script.kind == TRAIN:
        data = (
            f'"{script.site.job.local}/data"'
            if script.job.stage is not None
            else next(command_words([script.data]))
        )
        words += ['--run "$run"', "--data", data]
    lines.append(f'command=("${{grappe[@]}}" {" ".join(words)})')
    return "\n".join(lines)


FINISHED = """\
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}
export GRAPPE_FAILURE=$run/logs/job-$job.failed

# A finished run ends at once, however often it is started.
if [ -e "$run/done" ]; then
    echo "$run is finished: nothing to do"
    rm -f "$run/logs/job-$job.end" # it may be a link of somebody else's
    echo 0 > "$run/logs/job-$job.end"
    exit 0
fi"""

FRESH = """
rm -f "$run/logs/job-$job.end" "$GRAPPE_FAILURE" "$run/logs/job-$job.why\""""

CHAINED = """
# A chain whose job failed by itself is over.
if [ -e "$run/logs/job-$job.failed" ]; then
    echo "an earlier job of this chain failed: nothing to do"
    exit "$(cat "$run/logs/job-$job.failed")"
fi
# The job before may have died without giving the run back: its lease ends a minute after its last sign of life.
while [ -e "$run/lease.json" ] && [ $(($(date +%s) - $(stat -c %Y "$run/lease.json"))) -lt 65 ]; do
    sleep 5
done"""

STEPS = """\
# srun of Slurm 22.05 and later does not take --cpus-per-task from the job by itself.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# USR2 comes before the time limit and on preemption. Every process gets it, saves, and process 0 ends with 75.
# TERM comes when Slurm ends the job: there is a moment left to save.
told=0 ended=0 step=
# shellcheck disable=SC2317
pass_on() {
    told=1
    [ -z "$step" ] || kill -USR2 "$step" 2>/dev/null
}
trap pass_on USR2
trap 'ended=1; pass_on' TERM

# bash runs a trap only between commands, so srun runs behind it; a wait that a signal ended begins again.
run_step() {
    [ "$told" = 0 ] || return 75
    srun "$@" &
    step=$!
    while :; do
        wait "$step"
        kill -0 "$step" 2>/dev/null || break
    done
    wait "$step"
    code=$?
    step=
    return "$code"
}

# Leaves the exit code for grappe wait; of a job that Slurm ended, Slurm knows the reason.
end() {
    [ "$ended" = 1 ] || { rm -f "$run/logs/job-$job.end" && echo "$1" > "$run/logs/job-$job.end"; }
    exit "$1"
}"""

ONCE = """\
# Once on every node, on its local scratch.
read -r -d '' once <<'END'
set -u
{body}
END
"""

ON_EACH_NODE = """\
run_step --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 bash -c "$once\""""

# What is wrong with these nodes is said now, in seconds.
DOCTOR = (
    "run_step --kill-on-bad-exit=1 --wait=60 "
    '"${{grappe[@]}}" doctor{task} --job --plan "$plan" --folder "$run"'
)

FAILED = """\
# srun ends the others when one fails, and then says that they were killed: what failed first has left its code.
[ ! -e "$GRAPPE_FAILURE" ] || end "$(cat "$GRAPPE_FAILURE")\""""

MEET = """\
# Where the script's processes meet: on this node, that of process 0, at a port that is free now.
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK PYTHONUNBUFFERED=1
meet() {
    MASTER_ADDR=$(hostname)
    MASTER_PORT=$("${python[@]}" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
    export MASTER_ADDR MASTER_PORT
    [ -n "$MASTER_PORT" ]
}
"""

START = """\
# What each process runs. Its first failure leaves its code; after 75 srun must not end the others, which may be saving.
export first=$run/logs/job-$job.first
rm -f "$first"
read -r -d '' start <<'END'
{torchrun}trap : USR2 # which is for the program
"$@" {words}
code=$?
if [ "$code" != 0 ] && [ "$(cat "$first" 2>/dev/null || echo 75)" = 75 ]; then
    echo "$code" > "$first"
fi
[ "$code" != 75 ] || code=0
exit "$code"
END
"""

TORCHRUN = """\
# As torchrun says it.
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
export LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE GROUP_RANK=$SLURM_NODEID
"""

NO_LIGHTNING_REQUEUE = """\
# Lightning takes an interactive job for no Slurm job: it neither requeues this one nor replaces signal handlers.
export SLURM_JOB_NAME=interactive
"""

FIRST = """\
[ ! -e "$first" ] || code=$(cat "$first")
"""

IS_DONE = """\
[ "$code" != 0 ] || : > "$run/done"
"""

CHAIN_END = """\
# The next job of the chain goes on, if this one saved, or if something was killed.
if {{ [ "$code" = 75 ] || [ "$code" -gt 128 ]; }} && [ "$SLURM_ARRAY_TASK_ID" -lt {chain} ]; then
    exit "$code"
fi
end "$code\""""

CHAIN_END_SAVED = """\
# The next job of the chain goes on, if this one saved and ended with 75.
if [ "$code" = 75 ] && [ "$SLURM_ARRAY_TASK_ID" -lt {chain} ]; then
    exit "$code"
fi
end "$code\""""

AGAIN = """\
# 75: saved, and there is more to do. Above 128: killed, three times at most; 140 is USR2 before training began.
again=no
if [ "$code" = 75 ] || [ "$code" = 140 ]; then
    again=yes
elif [ "$code" -gt 128 ]; then
    echo "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}: exit code $code" >> "$run/logs/killed"
    [ "$(grep -c "^job $SLURM_JOB_ID," "$run/logs/killed")" -gt 3 ] || again=yes
fi
"""

AGAIN_SAVED = """\
# 75: saved, and there is more to do. All else would begin again.
again=no
[ "$code" != 75 ] || again=yes
"""

REQUEUE = """\
# A job that is being cancelled, or requeued by Slurm itself, is not running any more.
if [ "$again" = yes ] && [ "$ended" = 0 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ] &&
    [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then
    echo "back into the queue after restart ${{SLURM_RESTART_COUNT:-0}}, exit code $code"
    trap - TERM
    refused=0
    scontrol requeue "$SLURM_JOB_ID" || refused=$?
    # Slurm ends this script now, one process after the other: it leaves no exit code.
    # A code above 128: scontrol was ended first.
    if [ "$refused" = 0 ] || [ "$refused" -gt 128 ]; then
        sleep 60
        exit "$code"
    fi
fi
end "$code\""""


VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})")
OF_ONE_PROCESS = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "RANK", "LOCAL_RANK")
EMPTY = "is empty on this node, and an argument of the job needs it"


def literal(word: str) -> str:
    """Quotes a word for bash."""
    return f"'{word}'" if "," in word and "'" not in word else shlex.quote(word)


def expanded(word: str) -> str:
    """Quotes a word for bash, except `$NAME` and `${NAME}`, which bash expands; an empty variable ends the shell.

    All else that bash would take for code stays text: `$(…)`, quotes, semicolons.
    """
    pieces, at = [], 0
    for match in VARIABLE.finditer(word):
        pieces += [literal(word[at : match.start()])] if match.start() > at else []
        pieces.append(f'"${{{match[1] or match[2]}:?{EMPTY}}}"')
        at = match.end()
    if at < len(word) or not pieces:
        pieces.append(literal(word[at:]))
    return "".join(pieces)


def command_words(words: Sequence[str]) -> Iterator[str]:
    """Yields the quoted words of a command of grappe; a plan keeps its variables, since each process expands them.

    Raises:
        UsageError: a variable exists in processes only, not in the shell.
    """
    before = ""
    for word in words:
        is_plan = before == "--plan" or word.startswith("--plan=")
        names = {match[1] or match[2] for match in VARIABLE.finditer(word)}
        if not is_plan and (wrong := sorted(names & {*OF_ONE_PROCESS})):
            raise UsageError(
                f"{word}: ${wrong[0]} is another for each process: only a script's arguments take it"
            )
        yield literal(word) if is_plan else expanded(word)
        before = word
