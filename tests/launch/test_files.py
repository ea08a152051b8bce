"""Files below a run are opened without following links; every other file that the source opens has its reason here."""

import ast
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import grappe
from grappe.errors import RunError
from grappe.launch import files
from grappe.launch.files import IN_PART

ROOT = Path(grappe.__file__).parent
OPENS = """
open safe_open memmap save savez read_text read_bytes write_text write_bytes mkdir makedirs touch unlink rmdir remove
rmtree rename replace move truncate link symlink symlink_to hardlink_to copyfile copytree iterdir glob rglob scandir
listdir
"""
ELSEWHERE = {
    "launch/files.py": "the one place, and the user's own folder",
    "checkpoint/tensor_file.py": "np.memmap of a file that grappe.launch.files has opened",
    "checkpoint/foreign_training.py": "the first bytes of the file that the user names with --from; lists a folder",
    "checkpoint/initial.py": "makes the folder of a run that is not there yet; lists weights that the user names",
    "cli/exit.py": "/dev/null",
    "cli/completion.py": "names of files, folders and runs in the working folder, and the task's own file",
    "errors/causes.py": "the folders of PYTHONPATH",
    "cli/output.py": "pipes and devices that the user names with --out",
    "data/images/dataset.py": "archives and images that the user names",
    "data/images/decode.py": "Pillow, on bytes in memory",
    "data/images/index.py": "index and quarantine of a source of images, what they name",
    "data/images/listing.py": "archives, folders, files of labels and shards that the user names",
    "data/corpus/formats.py": "shards that the user names",
    "data/corpus/index.py": "folders and globs of shards that the user names",
    "data/corpus/tokenizing.py": "the folder of tokens that the user names, and a lock in it",
    "data/index_file.py": "an index beside its source or in the user's folder, or in memory",
    "data/staging.py": "data that the user names, and the folder for its copy",
    "data/loader.py": "lists the files that this process has open",
    "verbs/data/bench.py": "a temporary folder of its own",
    "engines/deepspeed/library.py": "torch's folder of compiled operators; the folder that the user names in the plan",
    "engines/deepspeed/settings.py": "the settings file that the user names in the plan",
    "foresight/devices/__init__.py": "the installation's own data sheets",
    "launch/child.py": "a link in a folder of this start's own, private to the user",
    "launch/fork.py": "/dev/null, and /proc, for the pipe of the process that has started this one",
    "launch/local.py": "/proc",
    "launch/mps.py": "/dev, and the user's own folder",
    "launch/openmp.py": "/proc",
    "launch/terminal.py": "/dev/null",
    "launch/rendezvous.py": "/dev/null, and the folder where processes meet",
    "training/watchdog.py": "/proc",
    "verbs/launch/surroundings.py": "the files that the user's own script opens, at the end of its silence",
    "private_api/gettext.py": "the installation's own catalogue of messages",
    "profiling/memory.py": "/proc, /sys, /sys/fs/cgroup",
    "profiling/energy.py": "/sys/class/powercap",
    "sites/__init__.py": "site files of the installation and the user",
    "sites/environment.py": "the installation's own files",
    "slurm.py": "lists runs and their logs, to name them",
    "tasks/__init__.py": "the task's file that the user names",
    "tasks/pysource.py": "the user's data sets",
    "training/plot.py": "the file that the user names",
    "training/run.py": "the folder of runs, and new runs in it",
    "training/task_reference.py": "the task's file, of the user's own records",
    "training/watchers/profile.py": "gzip of a file that grappe.launch.files has made",
    "verbs/data/walk.py": "shards that the user names",
    "verbs/verify/record.py": "the record that the user names",
    "verbs/data/pack.py": "the folder of shards that the user names, and a lock in it",
    "verbs/doctor/checks/__init__.py": "the source's own files",
    "verbs/doctor/checks/cpp.py": "libraries beside torch's, and beside the task's file that the user names",
    "verbs/doctor/checks/host.py": "/sys/class",
    "verbs/doctor/checks/job.py": "a temporary folder of its own; the folders of wheels that pip is told of",
    "verbs/doctor/checks/python.py": "/proc/driver",
    "verbs/drill.py": "damages a run of its own on purpose",
    "verbs/export/cpp.py": "C++ files that the user names",
    "verbs/export/folder.py": "the source's own files",
    "verbs/export/proof.py": "np.save to a file that grappe.launch.files has made",
    "verbs/fetch.py": "an https address; the folder of datasets that the user names; tarfile, on an open file",
    "verbs/submit/jobs.py": "lists runs",
    "words.py": "/proc/cpuinfo",
    "verbs/submit/packages.py": "the file of the user's task, its neighbours; a temporary folder of its own",
    "foresight/kernels.py": "a trace of the profiler, in a temporary folder of its own",
    "verbs/export/formats.py": "lists the folder that it has just made",
    "verbs/predict/predict.py": "a file that the user names with --out",
    "verbs/predict/inputs.py": "pictures, and files of samples, that the user names",
    "verbs/report/report.py": "measurements that the user names, and the source's own page",
    "verbs/runs.py": "lists runs",
    "verbs/submit/submit.py": "the run's folder, and a temporary folder of its own",
    "verbs/tune/trainings.py": "/dev",
    "verbs/tune/study.py": "makes the folder of a study that is not there yet",
    "verbs/verify/runner.py": "a temporary folder of its own",
    "verbs/verify/trained_by_plan.py": "a temporary folder of its own",
}
"""Files of the source that open something else than what is in a run, and what."""


def opened(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        if isinstance(of, ast.Name) and of.id in ("files", "dataclasses", "self"):
            continue  # grappe.launch.files; dataclasses.replace; a method of one's own
        if name == "replace" and (len(node.args) != 1 or node.keywords) and not _is(of, "os"):
            continue  # a string's
        own = name in ("remove", "link", "truncate", "move", "save") or (name == "rename" and len(node.args) != 1)
        if own and not _is(of, "os", "shutil", "np"):
            continue  # a list's, or a function of grappe's
        if name in OPENS.split():
            yield node.lineno, name


def _is(node: ast.expr | None, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def test_what_opens_files_is_found() -> None:
    def found(text: str) -> list[str]:
        return [name for _, name in opened(ast.parse(text))]

    of_paths = found("open(a)\na.open('rb')\nos.open(a, 0)\na.read_text()\na.unlink()")
    assert of_paths == ["open", "open", "open", "read_text", "unlink"]
    of_modules = found("shutil.rmtree(a)\na.replace(b)\nos.replace(a, b)\na.rename(b)\nos.remove(a)")
    assert of_modules == ["rmtree", "replace", "replace", "rename", "remove"]
    assert found("files.replace(a, b)\n'a'.replace('b', 'c')\ndataclasses.replace(a, b=c)\nlist.remove(1)") == []


def test_files_of_a_run_are_opened_in_one_place() -> None:
    found = {}
    for file in sorted(ROOT.rglob("*.py")):
        lines = list(opened(ast.parse(file.read_text())))
        if lines:
            found[str(file.relative_to(ROOT))] = lines
    strangers = {name: lines for name, lines in found.items() if name not in ELSEWHERE}
    assert not strangers, f"take grappe.launch.files, or say here what is opened: {strangers}"
    assert not set(ELSEWHERE) - set(found), "these open nothing any more"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run/logs").mkdir(parents=True)
    (tmp_path / "run/logs/log").write_text("ours")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/log").write_text("theirs")
    return tmp_path / "run"


def test_a_folder_on_the_way_is_no_link(run: Path, tmp_path: Path) -> None:
    (run / "part").symlink_to(tmp_path / "outside")
    for act in (
        lambda file: files.read_bytes(file, IN_PART),
        lambda file: files.appender(file, IN_PART),
        lambda file: files.new_file(file.with_name("new"), IN_PART),
        lambda file: files.replace(file, b"", IN_PART),
        lambda file: files.make_folder(file.with_name("new"), IN_PART),
        lambda file: files.rename(file, file.with_name("new"), IN_PART),
        lambda file: files.remove(file, IN_PART),
        lambda file: files.remove_tree(file.parent),
        lambda file: files.names(file.parent),
        lambda file: files.flush(file.parent),
        lambda file: files.make_folder(file.parent),
    ):
        with pytest.raises((RunError, OSError), match=r"part is a link|symbolic link"):
            act(run / "part/log")
    assert [(one.name, one.read_text()) for one in (tmp_path / "outside").iterdir()] == [("log", "theirs")]


def test_the_file_itself_is_no_link(run: Path, tmp_path: Path) -> None:
    for target in ("outside/log", "outside/none"):
        (run / "logs/link").unlink(missing_ok=True)
        (run / "logs/link").symlink_to(tmp_path / target)
        for act in (files.read_bytes, files.appender):
            with pytest.raises(RunError, match="logs/link is a link"):
                act(run / "logs/link", IN_PART)
    with pytest.raises(FileExistsError):
        files.new_file(run / "logs/link", IN_PART)
    files.replace(run / "logs/link", b"new", IN_PART)
    assert files.read_text(run / "logs/link", IN_PART) == "new"
    assert sorted(one.name for one in (run / "logs").iterdir()) == ["link", "log"]
    assert not (tmp_path / "outside/none").exists()


def test_a_pipe_is_no_file_and_nobody_waits_for_it(run: Path) -> None:
    os.mkfifo(run / "pipe")
    with pytest.raises(RunError, match="is not a file"):
        files.reader(run / "pipe")
    with pytest.raises((RunError, OSError)):
        files.appender(run / "pipe")


def test_new_files_have_the_users_mode(run: Path) -> None:
    before = os.umask(0o027)
    try:
        files.replace(run / "a", b"")
        files.appender(run / "b").close()
        files.new_file(run / "c").close()
        files.replace(run / "secret", b"", mode=files.PRIVATE)
    finally:
        os.umask(before)
    modes = {one.name: one.stat().st_mode & 0o777 for one in run.iterdir() if one.is_file()}
    assert modes == {"a": 0o640, "b": 0o640, "c": 0o640, "secret": 0o600}


def test_a_failed_replacement_leaves_the_old(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.replace(run / "logs/log", b"new", IN_PART, durable=True)
    assert [(one.name, one.read_text()) for one in (run / "logs").iterdir()] == [("log", "ours")]


def test_paths_may_be_relative_and_short(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run / "logs")
    assert files.read_text(Path("log"), 3) == "ours"
    assert files.names(Path(), 2) == ["log"]


def test_a_lock_is_one_process_s_and_a_disk_without_locks_refuses_nobody(tmp_path, monkeypatch):
    with (tmp_path / "lock").open("w") as one, (tmp_path / "lock").open("w") as other:
        assert files.take_lock(one)
        assert not files.take_lock(other)

        def without(*_: object) -> None:
            raise OSError(errno.EOPNOTSUPP, "no locks")

        monkeypatch.setattr(files.fcntl, "flock", without)
        assert files.take_lock(other)
