"""Input of the fuzzer: words, JSON, and runs that are damaged as an accident or an attacker would."""

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from grappe.checkpoint.commit import MANIFEST, fingerprint, json_hash
from grappe.errors import GrappeError
from grappe.launch.rank import ProcessRank
from grappe.plan import Plan
from grappe.training.run import Run
from grappe.training.short_run import with_task
from grappe.training.task_reference import TaskReference
from grappe.verbs import evaluate
from grappe.verbs.load import choose

EXAMPLES = int(os.environ.get("GRAPPE_FUZZ", "0"))
"""How many of each kind are tried, and new ones each time; 0: a few, always the same."""

ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202e[red]"
TEXTS = st.one_of(
    st.sampled_from(
        [
            "",
            "a",
            ESCAPES,
            "../../outside",
            "/dev/zero",
            "nan",
            "-1",
            "none",
            "x\ny",
            "\udcff",
            "{0}",
            "=1+1",
            "9" * 5000,
            "step",
            "évaluation",
            "$(touch ran)",
            "`touch ran`",
            "os:system",
            "%s%s%n",
        ]
    ),
    st.text(max_size=30),
)
NUMBERS = st.one_of(
    st.integers(-(10**20), 10**20), st.sampled_from([0, 1, -1, 2**31, 2**63, 10**400, -(10**400)]), st.floats()
)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
DEEP = [b"[" * 100_000, b'{"a":' * 50_000, b"[" * 900 + b"]" * 900]
BYTES = st.one_of(st.binary(max_size=60), st.sampled_from([b"", b"{}", b"[]", b"\xff\xfe", b"\x80\x04K.", *DEEP]))
NAMES = """
run.json metrics.jsonl usage.jsonl lease.json done report.html logs logs/jobs.jsonl logs/rank-0.log samples
samples/rank-0.jsonl checkpoints checkpoints/NEWEST checkpoints/NEWEST/manifest.json checkpoints/NEWEST/state.json
checkpoints/NEWEST/rank-0.safetensors
"""
FILES = tuple(NAMES.split())
KINDS = ("pipe", "folder", "file", "link out", "link to itself", "endless", "nothing", "renamed")
DAMAGE = st.lists(
    st.one_of(
        st.tuples(st.just("bytes"), st.sampled_from(FILES), BYTES),
        st.tuples(st.just("flip"), st.sampled_from(FILES), st.integers(0, 10**5)),
        st.tuples(st.just("cut"), st.sampled_from(FILES), st.integers(0, 10**5)),
        st.tuples(st.just("json"), st.sampled_from(FILES), st.tuples(st.integers(0, 50), JSON)),
        st.tuples(st.just("line"), st.sampled_from(FILES[1:3]), JSON),
        st.tuples(st.just("kind"), st.sampled_from(FILES), st.sampled_from(KINDS)),
    ),
    min_size=1,
    max_size=3,
)


def fuzzed(few: int) -> Callable[[Any], Any]:
    """Settings of a test: `few` examples, or as many as GRAPPE_FUZZ says."""
    return settings(
        max_examples=EXAMPLES or few,
        deadline=None,
        derandomize=not EXAMPLES,
        database=None,
        phases=[Phase.generate],  # to make a failing example smaller takes minutes of trainings
        suppress_health_check=list(HealthCheck),
    )


def told(verb: Callable[[], object]) -> str:
    """The words of grappe's own error, or nothing; any other exception is the failure that is looked for."""
    try:
        verb()
    except GrappeError as error:
        assert str(error)
        return str(error)
    except OSError as error:  # the command line makes one message of it
        assert error.filename or error.strerror
    return ""


def evaluated(folder: Path, task: TaskReference, working_folder: Path) -> None:
    """Evaluates a run in this process."""
    plan, step = Plan.parse("threads=1"), choose(Run(folder))[1].step
    work = functools.partial(evaluate.checkpoint_scores, folder, step, "validation", False, "fp32")
    with_task(work, task, plan, folder, ProcessRank(launcher="test"), working_folder)


def damage(run: Path, outside: Path, todo: list[tuple[str, str, Any]], *, sealed: bool) -> None:
    """Damages a run; with `sealed`, the newest checkpoint's manifest fits again, as an attacker would make it."""
    newest = sorted((run / "checkpoints").iterdir())[-1].name
    owner = Run(run).read_id()
    for how, name, what in todo:
        file = run / name.replace("NEWEST", newest)
        if not file.parent.is_dir():
            continue
        if how == "kind":
            _change_kind(file, outside, what)
        elif file.is_file() and not file.is_symlink():
            file.write_bytes(_changed(file.read_bytes(), how, what))
        elif how == "bytes" and not os.path.lexists(file):
            file.write_bytes(what)
    folder = run / "checkpoints" / newest
    # Behind a link lies what is outside, which the damage itself must not change.
    there = folder.is_dir() and not folder.is_symlink() and not folder.parent.is_symlink()
    if sealed and there and (not (folder / MANIFEST).exists() or (folder / MANIFEST).is_file()):
        seal(folder, owner)


def seal(checkpoint: Path, run: str | None = None) -> None:
    """Makes a manifest that is right for the files there, as whoever sends them can."""
    files = {one.name: fingerprint(one) for one in checkpoint.iterdir() if one.is_file() and not one.is_symlink()}
    files.pop(MANIFEST, None)
    run = Run(checkpoint.parents[1]).read_id() if run is None else run
    content = {"step": int(checkpoint.name.partition("-")[2]), "run": run, "samples": 0, "files": files}
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    (checkpoint / MANIFEST).write_text(json.dumps({**content, "xxh3_128": json_hash(content)}))


def _changed(content: bytes, how: str, what: Any) -> bytes:
    match how:
        case "bytes":
            return what
        case "flip" if content:
            place = what % len(content)
            return content[:place] + bytes([content[place] ^ 1 << what % 8]) + content[place + 1 :]
        case "cut":
            return content[: what % (len(content) + 1)]
        case "line":
            return (
                content + json.dumps(what if isinstance(what, dict) else {"kind": "step", "x": what}).encode() + b"\n"
            )
        case "json":
            return _json_changed(content, *what)
    return content


def _json_changed(content: bytes, place: int, value: Any) -> bytes:
    try:
        known = json.loads(content.partition(b"\n{")[0])
    except ValueError:
        return content
    if not isinstance(known, dict):
        return content
    known.pop("xxh3_128", None)  # the description's hash, which is optional
    home, names = known, sorted(known)
    if names:
        name = names[place % len(names)]
        if isinstance(home[name], dict) and home[name] and place % 2:
            home = home[name]
            name = sorted(home)[place % len(home)]
        home[name] = value
    return json.dumps(known).encode() + b"\n"


def _change_kind(file: Path, outside: Path, kind: str) -> None:
    spare = file.with_name(file.name + ".was")
    if os.path.lexists(file) and not os.path.lexists(spare):
        file.rename(spare)
    elif os.path.lexists(file):
        shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink()
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "file":
            file.write_bytes(b"no folder")
        case "link out":
            file.symlink_to(outside)
        case "link to itself":
            file.symlink_to(file.name)
        case "endless":
            file.symlink_to("/dev/zero")
        case "renamed" if os.path.lexists(spare):
            name = file.name.replace("step-", "step-9")
            spare.rename(file.with_name(name if name != file.name else f"{file.name}-2"))
