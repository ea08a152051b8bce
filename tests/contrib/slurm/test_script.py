"""The batch script is a pure function: held to golden files, to shellcheck, and to hostile names and paths."""

import dataclasses
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from grappe import sites
from grappe.contrib.slurm.script import FUNCTIONS, Script, check_name, clock, command_words, expanded, notice, render
from grappe.errors import UsageError
from grappe.plan import Plan
from grappe.sites.layout import layout
from grappe.sites.sbatch import SCRIPT, JobOptions
from tests import needs
from tests.contrib.slurm.golden import FOLDER, golden, script, with_job
from tests.patience import PATIENCE_SECONDS
from tests.typed import stand_in

HOSTILE = ["$(touch hacked)", "`touch hacked`", "a; touch hacked", "a\ntouch hacked", "a' b", 'a" b', "a b", "", "é"]


def narval(*, job: dict[str, Any] | None = None, **changes) -> Script:
    """A script with changes, and with changes of its job's options."""
    return dataclasses.replace(with_job(script(sites.find("narval"), "1-node"), **(job or {})), **changes)


@pytest.mark.parametrize(("name", "made"), golden().items(), ids=golden())
def test_scripts_are_the_golden_ones(name: str, made: Script) -> None:
    assert render(made) == (FOLDER / name).read_text(), "python -m tests.contrib.slurm.golden writes them anew"


def test_no_golden_file_is_left_over() -> None:
    assert {file.name for file in FOLDER.iterdir()} == set(golden())


def test_shellcheck_finds_nothing() -> None:
    needs.program("shellcheck")
    command = ["shellcheck", "--exclude=SC1090,SC1091", FUNCTIONS, *sorted(FOLDER.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_script_can_be_read_in_a_minute() -> None:
    """A fact that is not confirmed, a variable of the site and an option of the user's are a line each."""
    for name, made in golden().items():
        lines = [line for line in render(made).splitlines() if not line.startswith("# Unconfirmed")]
        assert len(lines) - len(made.site.job.variables) <= (48 if "options" in name else 40), name


@pytest.mark.parametrize(
    "environment", ["here", "virtualenv", "module", "conda:my env", "/home/me/env", "/me/image.sif"]
)
@pytest.mark.parametrize("chain", [0, 3])
def test_every_kind_of_script_is_bash(environment: str, chain: int, tmp_path: Path) -> None:
    text = render(
        narval(job={"env": environment, "chain": chain, "stage": Path("/data/my $x.tar"), "wheels": Path("/w w")})
    )
    file = tmp_path / "job.sh"
    file.write_text(text)
    subprocess.run(["bash", "-n", str(file)], check=True)
    assert ("--requeue" in text) is not bool(chain)
    assert ("#SBATCH --array=1-3%1" in text) is bool(chain)
    assert "on_each_node unpack '/data/my $x.tar' \"$SLURM_TMPDIR/data\"\n" in text


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "/runs/.compiled"), ({"TORCHINDUCTOR_CACHE_DIR": "/mine"}, "/mine")]
)
def test_compiled_kernels_are_kept_beside_the_runs(given: dict[str, str], expected: str) -> None:
    """The user's own folder counts; an image sees the run's folder alone, and has torch's default."""
    line = "export TORCHINDUCTOR_CACHE_DIR="
    assert line not in render(narval())
    assert line not in render(narval(plan=Plan.parse("compile"), job={"env": "/me/image.sif"}))
    text = render(narval(plan=Plan.parse("compile")))
    exported = next(one for one in text.splitlines() if one.startswith(line))
    done = subprocess.run(
        ["bash", "-c", f'run=/runs/a; {exported}; printf %s "$TORCHINDUCTOR_CACHE_DIR"'],
        capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin", **given},
    )  # fmt: skip
    assert done.stdout == expected


def test_lightnings_requeue_is_off_in_a_script_that_imports_it_and_the_doctor_reads_its_imports() -> None:
    own = {"kind": SCRIPT, "task": (), "arguments": ("my script.py", "--lr", "1")}
    for torchrun, lightning in ((True, True), (False, True), (True, False)):
        text = render(narval(torchrun=torchrun, lightning=lightning, **own))
        assert ("export SLURM_JOB_NAME=interactive" in text) is lightning
        assert " doctor --script 'my script.py' --job" in text
    assert "--script" not in render(narval())


def now() -> int:
    return int(time.time())


def job(run: Path, text: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a script of the functions that a job's script sources, with the variables of job 5."""
    (run / "logs").mkdir(parents=True, exist_ok=True)
    shutil.copy(FUNCTIONS, run / "logs")
    return subprocess.run(
        ["bash", "-uc", f"source {run}/logs/job.sh || exit 1\n{text}"],
        capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS,
        env={"PATH": os.environ["PATH"], "SLURM_JOB_ID": "5", "SLURM_CPUS_PER_TASK": "1", **variables},
    )  # fmt: skip


@pytest.mark.parametrize(("text", "code"), [("step false", 0), ("end 7", 7)], ids=["finished", "ended"])
def test_the_exit_code_is_not_written_through_a_link(tmp_path: Path, text: str, code: int) -> None:
    run, outside = tmp_path / "run", tmp_path / "thesis"
    (run / "logs").mkdir(parents=True)
    outside.write_text("mine")
    end = run / "logs" / "job-5.end"
    end.symlink_to(outside)
    if not code:
        (run / "done").touch()
    assert job(run, text).returncode == code
    assert outside.read_text() == "mine"
    assert not end.is_symlink()
    assert int(end.read_text()) == code


@pytest.mark.parametrize(("scontrol", "left"), [(0, False), (143, False), (1, True)])
def test_a_job_that_goes_back_into_the_queue_leaves_no_exit_code(tmp_path: Path, scontrol: int, left: bool) -> None:
    """Slurm's commands are stand-ins: Slurm ends scontrol or sleep before bash, or refuses."""
    run, commands = tmp_path / "run", tmp_path / "bin"
    stand_in(commands, squeue="echo RUNNING", scontrol=f"exit {scontrol}", sleep="exit 143")
    path = f"{commands}:{os.environ['PATH']}"
    assert job(run, "step bash -c 'exit 75'\nstep touch no\nfinish train 3", PATH=path).returncode == 75
    assert (run / "logs" / "job-5.end").exists() is left


def test_nodes_that_slurm_takes_out_and_where_processes_die_count_once_for_each_start(tmp_path: Path) -> None:
    """sinfo is a stand-in; the rule is that of submit (tests/contrib/slurm/test_jobs.py)."""
    run, commands = tmp_path / "run", tmp_path / "bin"
    stand_in(commands, sinfo="echo 'n0 idle none'; echo 'n1 down* Not responding'")
    variables = {"PATH": f"{commands}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[0-1]"}
    assert job(run, 'failed_nodes "$failures"', **variables).stdout == ""
    log = run / "logs" / "job-5.out"
    log.write_text("srun: error: n3: task 1: Killed\n")
    said = "srun: error: n1: task 0: Out Of Memory\nsrun: error: n1: task 1: Killed\nsrun: error: n2: task 2: Killed\n"
    twice = f"printf '{said}' >> {log}\nnote_death\nfailed_nodes $failures"
    done = job(run, twice, SLURM_RESTART_COUNT="2", **variables)
    evidence, noted = ["Slurm: down*, Not responding", "a process was ended: Killed"], f"in {tmp_path}/.failed-nodes"
    assert done.stdout.strip().splitlines() == [f"noted against node n1, {noted}: {text}" for text in evidence]
    done = job(run, twice, SLURM_RESTART_COUNT="3", **variables)
    assert done.stdout.splitlines()[-1] == "n1"
    notes = (tmp_path / ".failed-nodes").read_text().splitlines()
    noted = [f"n1 5.{start} run: {text}" for start in (20, 30) for text in evidence]
    assert [note.split(" ", 1)[1] for note in notes] == noted, "n3 died in an earlier start, n2 after n1"


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize(("code", "place", "goes_on"), [(75, 1, True), (137, 1, None), (1, 1, False), (75, 2, False)])
def test_the_next_job_of_a_chain_goes_on(tmp_path, command: str, code: int, place: int, goes_on: bool | None) -> None:
    """After a save, and after a kill of what resumes; not after the last."""
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": str(place), "SLURM_ARRAY_TASK_MAX": "2"}
    assert job(tmp_path, f"step bash -c 'exit {code}'\nfinish {command} 0", **array).returncode == code
    left = (tmp_path / "logs" / "job-5.end").exists()
    assert left is not (command == "train" if goes_on is None else goes_on)


@pytest.mark.parametrize(("command", "kills"), [("train", 3), ("evaluate", 0)])
def test_what_is_killed_goes_back_three_times(tmp_path: Path, command: str, kills: int) -> None:
    """Slurm's commands are stand-ins, as functions."""
    slurm = "squeue() { echo RUNNING; }; sleep() { :; }; scontrol() { echo requeued; }\n"
    for number in range(4):
        done = job(tmp_path, f"{slurm}step bash -c 'kill -9 $$'\nfinish {command} 50", SLURM_RESTART_COUNT=str(number))
        assert done.returncode == 137
        assert ("requeued" in done.stdout) is (number < kills)


def test_what_slurm_ends_to_requeue_it_counts_as_no_kill(tmp_path: Path) -> None:
    for ended in (1, 0):
        done = job(tmp_path, f"step bash -c 'kill -9 $$'\nended={ended}\nfinish train 50", PATH=os.environ["PATH"])
        assert done.returncode == 137
        assert (tmp_path / "logs" / "killed").exists() is not bool(ended)


def test_a_loss_that_was_no_number_on_one_node_is_noted_unless_the_same_was_seen_before(tmp_path: Path) -> None:
    run, why = tmp_path / "run", "step 3, loss nan of samples 4, 5 alone"
    for node, start in (("n1", "0"), ("n2", "1")):  # the same samples elsewhere: it is not the node
        text = f"echo '{now()} {node} {why}' > $run/logs/job-5.wrong-{node}; echo 1 > $GRAPPE_FAILURE\n"
        text += "step false\nfinish train 5"
        assert job(run, text, SLURM_RESTART_COUNT=start).returncode == 1, "the job does not go on"
    notes = (tmp_path / ".failed-nodes").read_text().splitlines()
    assert [note.split(" ", 1)[1] for note in notes] == [f"n1 5.0 run: {why}"]


@pytest.mark.parametrize(
    ("note", "before", "step", "code"),
    [
        ("n1 process 1 stood still", "", "false", 1),
        # Those that srun ends since another stood still are not noted.
        ("n2 process 2 stood still", "echo 'srun: error: n1: task 1: Killed' >> $log; ", "bash -c 'kill -9 $$'", 137),
    ],
)
def test_a_node_on_which_a_process_stood_still_is_noted_and_the_job_ends(
    tmp_path: Path, note: str, before: str, step: str, code: int
) -> None:
    text = f"mkdir -p $run/logs; {before}echo '{now()} {note}' > $run/logs/job-5.wrong-n0\nstep {step}\nfinish train 50"
    assert job(tmp_path / "run", text).returncode == code
    node, _, evidence = note.partition(" ")
    assert (tmp_path / ".failed-nodes").read_text().split(" ", 1)[1] == f"{node} 5.0 run: {evidence}\n"


def test_a_training_that_ends_with_0_and_is_not_finished_has_failed(tmp_path: Path) -> None:
    done = job(tmp_path / "run", "step sh -c 'exit 0'\nfinish train 50")
    assert done.returncode == 1 and "exit code 0 and is not finished" in done.stdout
    done = job(tmp_path / "run", "step sh -c 'exit 0'\n: > $run/done\nfinish train 50")
    assert done.returncode == 0 and "not finished" not in done.stdout


@pytest.mark.parametrize("code", [1, 75, 137])
def test_what_is_only_in_doubt_is_noted_at_each_start_and_decides_nothing(tmp_path: Path, code: int) -> None:
    run, slurm = tmp_path / "run", "squeue() { echo RUNNING; }; sleep() { :; }; scontrol() { echo $1; }\n"
    for start in ("0", "1"):
        text = f"{slurm}echo '{now()} n1 GPU 0 had 3 errors' > $run/logs/job-5.doubt-n1\n"
        text += f"step sh -c '[ {code} = 137 ] && kill -9 $$; exit {code}'\n"
        done = job(run, f"{text}finish train 50", SLURM_RESTART_COUNT=start)
        assert done.returncode == code
        assert ("requeue" in done.stdout) is (code in (75, 137))
        assert ("leaves out n1" in done.stdout) is (start == "1" and code in (75, 137))
    notes = (tmp_path / ".failed-nodes").read_text().splitlines()
    assert [note.split(" ", 1)[1] for note in notes] == [f"n1 5.{10 * n} run: GPU 0 had 3 errors" for n in (0, 1)]


def test_all_that_was_left_against_a_node_is_noted_once_with_its_time_and_counts_as_one_start(tmp_path: Path) -> None:
    at, logs = now(), tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "job-5.doubt-n1").write_text(f"{at - 9} n1 broken (doctor)\n" * 2 + f"{at - 2} n2 slow (training)\n")
    (logs / "job-5.doubt-n2").write_text(f"{at - 3} n1 slow (training)\n{at - 1} n1 not broken (doctor)\n")
    done = job(tmp_path / "run", "step true\nfinish train 5; failed_nodes $failures")
    assert "n1\n" not in done.stdout, "notes of one start are no two"
    notes = (tmp_path / ".failed-nodes").read_text().splitlines()
    assert notes == [
        f"{at - 9} n1 5.0 run: broken (doctor)",
        f"{at - 3} n1 5.0 run: slow (training)",
        f"{at - 2} n2 5.0 run: slow (training)",
        f"{at - 1} n1 5.0 run: not broken (doctor)",
    ]
    assert not list(logs.glob("job-5.doubt*"))
    (logs / "job-5.wrong-n1").write_text(f"{at} n1 proven: process 1, step 3\n")
    assert job(tmp_path / "run", "note_left wrong\nfailed_nodes $failures").stdout.endswith("\nn1\n")


STAND_INS = """
squeue() { case $* in *%N) echo "$left" ;; *) echo RUNNING ;; esac; }
scontrol() { if [ "$1" = show ]; then echo "$3" | tr , '\\n'; else echo requeued; fi; }
sleep() { :; }
srun() { echo "$@"; [ ! -s "$words" ] || { cat "$words" >> "$log"; : > "$words"; return 137; }; }
work() { step srun "${of_size[@]}" "$plan"; }
size 3 3 three; size 2 2 two
"""


@pytest.mark.parametrize(
    ("words", "left", "expected"),
    [
        ("n1: task 1: Killed", "n0,n1,n2,n3", ["n0,n1,n2 three", "n0,n2,n3 three"]),  # n1 is the spare now
        ("n1: task 1: Exited with exit code 137", "n0,n1,n2,n3", ["n0,n1,n2 three", "n0,n2,n3 three"]),  # its child was
        ("Node failure on n1", "n0,n2", ["n0,n1,n2 three", "n0,n2 two"]),
        ("Node failure on n1", "n0", ["n0,n1,n2 three"]),
        ("n1: task 1: Exited with exit code 3", "n0,n1,n2,n3", ["n0,n1,n2 three", "n0,n1,n2 three"]),
    ],
)
def test_a_step_that_lost_a_node_begins_again_on_those_that_are_left(
    tmp_path: Path, words: str, left: str, expected: list[str]
) -> None:
    said = tmp_path / "said"
    said.write_text(f"srun: error: {words}\n")
    variables = {"SLURM_JOB_NODELIST": "n0,n1,n2,n3", "SLURM_NNODES": "4", "left": left, "words": str(said)}
    done = job(tmp_path / "run", f"{STAND_INS}fit 1\nkeep_going\nfinish train 50", **variables)
    started = [line.partition("--nodelist=")[2] for line in done.stdout.splitlines() if line.startswith("--nodes")]
    assert started == expected, done.stdout + done.stderr
    assert ("requeued" in done.stdout) is (left == "n0")


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_name_account_or_folder_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--name="):
        check_name(text)
    with pytest.raises(UsageError, match="--account="):
        render(narval(job={"account": text}))
    if text:  # without a name the run's is the job's
        with pytest.raises(UsageError, match="--name="):
            render(narval(job={"name": text}))
        with pytest.raises(UsageError, match="--run"):
            render(narval(run=Path("/scratch") / text))


@pytest.mark.parametrize("word", [one for one in HOSTILE if "\n" not in one])
def test_hostile_words_reach_the_program_as_they_are(word: str, tmp_path: Path) -> None:
    """The command's words, the folder and the data path, through a real bash: nothing of them is run."""
    folder = tmp_path / (word or "empty")
    folder.mkdir()
    made = narval(
        arguments=("train", word), task=(word,), folder=folder, data=word, job={"doctor": False, "env": "here"}
    )
    functions = "source() { :; }; keep_going() { work; }; finish() { :; }"
    probe = f'{functions}; step() {{ printf \'%s\\0\' "$PWD" "$@"; }}\n{render(made)}'
    done = subprocess.run(["bash", "-c", probe], capture_output=True, text=True, check=True, cwd=tmp_path)
    place, *words = done.stdout.split("\0")[:-1]
    program = [made.python, "-m", "grappe"]
    expected = [*program, "train", word, "--run", str(made.run), "--data", word]
    assert place == str(folder) and words[words.index(made.python) :] == expected
    assert not list(tmp_path.rglob("hacked"))


def test_line_breaks_are_refused_wherever_they_come() -> None:
    for changes in (
        {"arguments": ("train", "a\nb")},
        {"folder": Path("/a\nb")},
        {"data": "a\nb"},
        {"job": {"stage": Path("/a\nb")}},
    ):
        with pytest.raises(UsageError, match="line break"):
            render(narval(**changes))
    assert "hacked" not in render(narval(command="x\nhacked")).replace(r"\nhacked", "")


def test_processes_that_share_a_gpu_ask_for_what_mps_needs() -> None:
    site = sites.find("jean-zay-a100")
    plan = Plan(replicate=8, per_device=8)
    made = layout(plan, site, JobOptions(account="x@a100"))
    text = render(dataclasses.replace(script(site, "1-gpu"), plan=plan, layout=made))
    options = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --constraint=a100&mps" in options
    assert "#SBATCH --exclusive" in options
    assert "#SBATCH --constraint=a100" not in options
    assert {"#SBATCH --ntasks-per-node=8", "#SBATCH --cpus-per-task=1", "#SBATCH --gres=gpu:1"} <= set(options)


def test_times() -> None:
    assert [clock(one) for one in (59, 5400, 86400, 7 * 86400)] == ["00:00:59", "01:30:00", "1-00:00:00", "7-00:00:00"]
    assert [notice(one) for one in (60, 3600, 86400)] == [20, 180, 300]


@pytest.mark.parametrize("word", [one for one in HOSTILE if "\n" not in one])
def test_hostile_words_reach_a_script_as_they_are(word: str, tmp_path: Path) -> None:
    job_options = {"doctor": False, "env": "conda:one"}
    text = render(narval(arguments=("mine.py", word, "$HERE"), kind=SCRIPT, torchrun=True, job=job_options))
    process = text[text.index("process() {") : text.index("}\n", text.index("    program ")) + 2]
    slurm = dict.fromkeys(("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"), "1")
    done = job(tmp_path / "run", f"python=(printf '%s\\0')\n{process}process", HERE="a b", SLURM_NODEID="0", **slurm)
    assert done.stdout.split("\0")[:-1] == ["mine.py", word, "a b"]
    assert not list(tmp_path.rglob("hacked"))


def bash(word: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-uc", f"printf '%s' {expanded(word)}"],
        capture_output=True, text=True, check=False, cwd=folder, env={"PATH": "/usr/bin:/bin", **variables},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("tcp://$HOST:3456", "tcp://n 0:3456"),
        ("${HOST}x", "n 0x"),
        ("a,b", "a,b"),
        ("$HOST$HOST", "n 0n 0"),
        ("it's $HOST", "it's n 0"),
        ("$(touch hacked)", "$(touch hacked)"),
        ("`touch hacked`;$HOST", "`touch hacked`;n 0"),
        ("${HOST:-$(touch hacked)}", "${HOST:-$(touch hacked)}"),
        ("$((1+1))", "$((1+1))"),
        ("5$", "5$"),
        ("$1", "$1"),
        ('a" b', 'a" b'),
        ("", ""),
        ("$CODE", "$(touch hacked)"),
    ],
)
def test_variables_only(word: str, expected: str, tmp_path: Path) -> None:
    done = bash(word, tmp_path, HOST="n 0", CODE="$(touch hacked)")
    assert (done.stdout, done.returncode) == (expected, 0), done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("variables", [{}, {"HOST": ""}])
def test_an_empty_variable_ends_the_job(variables: dict[str, str], tmp_path: Path) -> None:
    done = bash("x$HOST", tmp_path, **variables)
    assert done.returncode != 0
    assert "HOST: is empty on this node, and an argument of the job needs it" in done.stderr


def test_a_plan_keeps_its_variables_for_each_process() -> None:
    words = ["train", "a,$B", "--plan", "offload=nvme:$TMP", "--plan=x$Y", "--data", "$D"]
    found = list(command_words(words))
    assert found[3:5] == ["'offload=nvme:$TMP'", "'--plan=x$Y'"]
    assert found[6] == '"${D:?is empty on this node, and an argument of the job needs it}"'
    with pytest.raises(UsageError, match=r"\$SLURM_PROCID is another for each process"):
        list(command_words(["train", "seed=$SLURM_PROCID"]))
