"""Renders the batch script of a job: a pure function of the submission and of the site."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from grappe.contrib.slurm import environment
from grappe.contrib.slurm.array import PLACE, TASK_ID, Array
from grappe.contrib.slurm.environment import Pack, Packages
from grappe.errors import UsageError
from grappe.errors.foreign_text import printable
from grappe.fields import NumberRange
from grappe.plan import Plan
from grappe.sites import sbatch
from grappe.sites.layout import Layout, charge
from grappe.sites.sbatch import LAUNCH, SCRIPT, TRAIN, TUNE, JobOptions, merged
from grappe.sites.schema import GPUS, MODULE, WARNS, Site

NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
ACCOUNT = re.compile(r"[\w.@+-]{1,64}", re.ASCII)
IMAGES = (".sif", ".simg")
FUNCTIONS = Path(__file__).with_name("job.sh")
"""The file of functions that a script sources, from the run's logs, into which submit puts it."""
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
    """The run's folder, the folder of a job that is no training, or that of an array's runs."""
    array: Array | None = None
    """The tasks of a job array, a run each; None: one job."""
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
    pack: Pack | None = None
    """A packed environment, which each node unpacks."""
    command: str = ""
    """The command that made the script, as a comment for the reader."""
    time_note: str = ""
    """The source of the time limit, likewise."""
    torch: str = ""
    """The version of torch that the job gets, likewise; "" if it is not known."""
    unchecked: str = ""
    """The reason why packages were not checked; "" if they were."""
    warnings: tuple[str, ...] = ()
    """Warnings of what will cost time or files, one line each."""
    foreseen: tuple[str, ...] | None = None
    """Warnings of its memory and its GPUs' use, with --time auto; None: nothing was traced."""

    @property
    def name(self) -> str:
        """The job's name, by default the run's."""
        return self.job.name or self.run.name[:64]

    @property
    def cost(self) -> str:
        """The job's maximal cost in words, of an array that of each task."""
        tasks = f", for each of {len(self.array.ids)} tasks" if self.array else ""
        return f"{cost(self.site, self.layout)}{tasks}"

    @property
    def environment(self) -> str:
        """The kind of environment, its folder or its image: the user's, or else the site's."""
        return self.job.env or self.site.job.environment

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules to load: the user's, or else the site's."""
        return environment.modules_of(self.site, self.job.modules, self.plan)


def render(script: Script) -> str:
    """Renders the script's text.

    Raises:
        UsageError: sbatch or a shell could read a name or a path as something else.
    """
    if not FOLDER.fullmatch(str(script.run)):
        raise UsageError(
            f"the run's folder {str(script.run)!r} has characters that sbatch or a shell reads as something else: "
            "give one of letters, digits and ./_-@+=:, with --run"
        )
    check_name(script.name)
    for module in script.job.modules:
        if not MODULE.fullmatch(module):
            raise UsageError(f"--modules={module}: this is not the name of a module, such as python/3.12")
    paths = (script.folder, script.job.stage or "", script.job.wheels or "", script.python)
    for word in (*script.arguments, *script.task, *map(str, paths), script.data, script.job.env):
        if printable(word, len(word)) != word:
            raise UsageError(f"{word!r} has a line break or another unprintable character in it: leave it out")
    tasks = script.array
    start = [
        "set -u",
        f"cd -- {shlex.quote(str(script.folder))} || exit 1",
        f"run={shlex.quote(str(script.run))}",
        "# Passes signals on to the processes, puts the job back into the queue: grappe submit writes the file.",
        *(["# From here on $run is the run of the task."] if tasks else []),
        f'source "$run/logs/{FUNCTIONS.name}"{f" {tasks.name}" if tasks else ""} || exit 1',
    ]
    if tasks and tasks.words:
        cases = (f"    {number}) words=({' '.join(command_words(words))}) ;;" for number, words in tasks.words.items())
        start += [f"case ${TASK_ID} in", *cases, "esac"]
    sections = ([_head(script)], start, _environment(script), _steps(script))
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


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
            raise UsageError(f"--account={account!r}: this is not a valid account name")
        options.append(f"--account={account}")
    options += [*site.ask.options, *(layout.queue.options if layout.queue else ())]
    # A number of processes would bound the nodes of a range.
    per_node = (
        f"--mincpus={layout.processes * layout.cores}" if layout.sizes else f"--ntasks-per-node={layout.processes}"
    )
    nodes = NumberRange(layout.nodes + layout.spare, layout.most_nodes)
    options += [f"--nodes={nodes}", per_node, f"--cpus-per-task={layout.cores}"]
    if layout.gpus and site.ask.gpus:
        options.append(site.ask.gpus.replace(GPUS, str(layout.gpus)))
    if layout.memory_gb:
        options.append(f"--mem={layout.memory_gb}G")
    return [*options, f"--time={clock(layout.seconds)}"]


def clock(seconds: int) -> str:
    """Formats seconds for sbatch: `5400` as `01:30:00`."""
    days, rest = divmod(seconds, 86400)
    text = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{text}" if days else text


def cost(site: Site, layout: Layout) -> str:
    """Describes a job's maximal cost in words: hours of GPUs or cores, and the site's own charge."""
    count, unit = layout.most_nodes * layout.gpus, "GPU"
    if not count:
        count, unit = layout.most_nodes * layout.processes * layout.cores, "core"
    what, hours = f"{count} {unit}{'s' if count > 1 else ''}", [f"{figure(count * layout.seconds / 3600)} {unit}-hours"]
    if site.node is not None and site.node.slice is not None and layout.gpus:
        what, hours = f"slice {site.node.slice.name}", []
    if site.charge is not None and (units := charge(site, layout)) is not None:
        hours.append(f"{figure(units)} {site.charge.unit}")
    return f"{what} for at most {clock(layout.seconds)}: {', '.join(dict.fromkeys(hours))}"


def figure(value: float) -> str:
    """Formats hours and units of a charge."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def check_name(name: str) -> None:
    """Raises UsageError if a job cannot have this name."""
    if not NAME.fullmatch(name):
        raise UsageError(f"--name={name!r}: letters, digits, '.', '_' and '-', 64 at most")


def _head(script: Script) -> str:
    site, layout, tasks = script.site, script.layout, script.array
    nodes = layout.most_nodes - layout.spare
    per_node = script.plan.processes // nodes if script.kind == LAUNCH else layout.processes  # one task starts them
    counts = (NumberRange(layout.nodes * per_node, nodes * per_node), NumberRange(layout.nodes, nodes))
    spare = f", {layout.spare} spare" if layout.spare else ""
    starts = f"{counts[0]} process{'es' if nodes * per_node > 1 else ''}"
    text = f"{starts} on {counts[1]} node{'s' if nodes > 1 else ''}{spare}"
    notes = [f"Made by: {script.command}"] if script.command else []
    notes += [f"{site.title}. {text}, plan: {script.plan}" if str(script.plan) else f"{site.title}. {text}"]
    chain = script.job.chain or 1
    notes += [f"{script.cost}{f', {chain} times' if chain > 1 else ''}"]
    notes += [note for note in (script.torch, script.time_note) if note]
    marks = [mark for mark in site.unconfirmed.items() if not mark[0].startswith(("storage", "slice"))]
    notes += [f"Unconfirmed, {fact}: {why}" for fact, why in marks]
    options = [f"--job-name={script.name}", *resource_options(site, layout, script.job.account)]
    options += [
        *([f"--signal=B:USR2@{notice(layout.seconds)}"] if script.saves else []),
        f"--output={script.run}/{f'{tasks.name}-%4a/logs/job-%A_%a' if tasks else 'logs/job-%j'}.out",
        "--open-mode=append",
        *([f"--array={tasks}"] if tasks else []),
        f"--array=1-{script.job.chain}%1" if script.job.chain else "--requeue" if site.job.requeue else "--no-requeue",
        # Of such a job Slurm does not requeue what lost its first node, where the script runs: others do not risk it.
        *(["--no-kill"] if layout.spare else []),
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


def _environment(script: Script) -> list[str]:
    """Renders the environment: modules, variables, and the Python interpreter."""
    site, kind, local = script.site, script.environment, script.site.job.local
    made, pack, lines = kind in environment.MADE_ON_NODES, script.pack, []
    base_folder = f"{local or '${TMPDIR:-/tmp}'}/grappe-$UID"
    if made or pack:
        lines.append("unset PYTHONPATH PYTHONHOME; export PYTHONNOUSERSITE=1 # no packages of another Python")
    if modules := script.modules if made else script.job.modules:
        lines.append(f"module purge\nmodule load {' '.join(modules)}")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in site.job.variables.items()]
    if site.job.warn_below is not None:
        lines.append(f"export {WARNS}={shlex.quote(f'{site.job.warn_below} {site.name}')}")
    if site.job.internet is False:
        lines.append("export WANDB_MODE=offline HF_HUB_OFFLINE=1 # compute nodes have no internet here")
    if script.plan.compile and not kind.endswith(IMAGES):  # an image sees only the run's folder
        lines.append("# Compiled kernels are kept for restarts, on other nodes too, and for later runs.")
        lines.append('export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-${run%/*}/.compiled}"')
    if script.job.stage is not None:
        if not local:
            raise UsageError(f"{site.name} has no local scratch folder to stage data to: leave --stage out")
        if script.kind != TRAIN:
            lines.append(f'export GRAPPE_DATA="{local}/data"')
        lines.append(f'on_each_node unpack {shlex.quote(str(script.job.stage))} "{local}/data"')
    if made:
        assert script.packages is not None, "what is made on the nodes is made of something"
        wheels = script.job.wheels
        words = [] if wheels is None else [f"--find-links {shlex.quote(str(wheels))}"]
        words += ["--no-deps"] if script.packages.locked else []
        base = "python" if script.modules else shlex.quote(script.python)
        lines.append(f'env="{base_folder}/{script.packages.key}"')
        lines.append(" ".join(['on_each_node make_environment "$env"', kind, base, *words]))
    if pack:
        lines.append(f'env="{base_folder}/{pack.file.name.partition(".")[0]}"')
        lines.append(f'on_each_node unpack_environment "$env" {shlex.quote(str(pack.file))}')
        lines.append('export PATH="$env/bin:$PATH" VIRTUAL_ENV="$env"')
    return [*lines, f"python={_python(script, kind)}"]


def _python(script: Script, kind: str) -> str:
    if kind == "here":
        return shlex.quote(script.python)
    if kind in environment.MADE_ON_NODES or script.pack:
        return "$env/bin/python"
    if kind.startswith("conda:"):
        return f"(conda run --no-capture-output --name {shlex.quote(kind.removeprefix('conda:'))} python)"
    if kind.endswith(IMAGES):
        program = '"$(command -v apptainer || command -v singularity)"'
        return f'({program} exec --nv --bind "$run" {shlex.quote(kind)} python)'
    return shlex.quote(str(Path(kind) / "bin" / "python"))


def _steps(script: Script) -> list[str]:
    """Renders the steps, of which the first that fails ends the job: the doctor, then the command."""
    kind = script.environment
    python = '"${python[@]}"' if kind.startswith("conda:") or kind.endswith(IMAGES) else '"$python"'
    srun, gpus = "srun --kill-on-bad-exit=1 --wait=60", " --gpu-bind=none" if script.layout.gpus else ""
    lines, plan = [], literal(str(script.plan))
    own_words = ['"${words[@]}"'] if script.array and script.array.words else []  # of each task
    if script.layout.sizes:
        srun, plan = f'{srun} "${{of_size[@]}}"', '"$plan"'
        lines.append("# The plan for each number of nodes: processes, plan. The batch is the same.")
        for number, sized in sorted(script.layout.sizes.items(), reverse=True):
            lines.append(f"size {number} {number * script.layout.processes} {literal(str(sized))}")
        lines.append(f"fit {script.layout.spare}")
    if script.job.doctor:
        words = ["--script", literal(script.arguments[0])] if script.kind == SCRIPT else command_words(script.task)
        line = " ".join([f"step {srun} {python} -m grappe doctor", *words, *own_words])
        lines.append(f'{line} --job --plan {plan} --runs "$run"')
    if script.kind == SCRIPT:
        lines.append("process() {")
        if script.torchrun:
            lines.append("    torchrun_variables")
        if script.lightning:
            lines.append("    # Lightning then neither requeues the job nor replaces signal handlers.")
            lines.append("    export SLURM_JOB_NAME=interactive")
        lines.append(" ".join([f"    program {python}", *map(expanded, script.arguments)]))
        lines += ["}", f"on_each_process{gpus}"]
    else:
        words = list(command_words(script.arguments))
        words[2:2] = own_words
        if script.layout.sizes:
            end = words.index("--") if script.kind == LAUNCH else len(words)
            at = words.index("--plan") if "--plan" in words[:end] else end
            words[at : min(at + 2, end)] = ["--plan", plan]
        if script.kind == TRAIN:
            staged = script.job.stage is not None
            data = f'"{script.site.job.local}/data"' if staged else next(command_words([script.data]))
            words += ['--run "$run"', "--data", data]
        line = " ".join([f"step {srun} --label{gpus} {python} -m grappe", *words])
        goes_on = script.kind in (TRAIN, TUNE, LAUNCH)  # where it was killed
        lines += ["work() {", f"    {line}", "}", "keep_going"] if goes_on else [line]
    return [*lines, f"finish {script.kind} {script.job.restarts}"]


VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})|" + re.escape(PLACE))
OF_ONE_PROCESS = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "RANK", "LOCAL_RANK")
EMPTY = "is empty on this node, and an argument of the job needs it"


def literal(word: str) -> str:
    """Quotes a word for bash."""
    return f"'{word}'" if "," in word and "'" not in word else shlex.quote(word)


def expanded(word: str) -> str:
    """Quotes a word for bash, but for `$NAME`, `${NAME}` and PLACE: bash expands them, and ends if one is empty.

    All else that bash would take for code stays text: `$(…)`, quotes, semicolons.
    """
    pieces, at = [], 0
    for match in VARIABLE.finditer(word):
        pieces += [literal(word[at : match.start()])] if match.start() > at else []
        pieces.append(f'"${{{match[1] or match[2] or TASK_ID}:?{EMPTY}}}"')
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
            raise UsageError(f"{word}: ${wrong[0]} is another for each process: only a script's arguments take it")
        yield literal(word) if is_plan else expanded(word)
        before = word
