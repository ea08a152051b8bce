"""Hostile files in a run that somebody sent: no code runs, nothing outside is touched, one clear error."""

import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from grappe.checkpoint.commit import MANIFEST, json_hash
from grappe.checkpoint.format import STATE
from grappe.errors import GrappeError
from grappe.training.run import Run
from grappe.training.task_reference import resolve_task
from grappe.verbs.load import load
from grappe.verbs.runs import describe, listing
from tests.faults.fuzz import evaluated, seal
from tests.faults.test_fuzz import workplace
from tests.parity.tasks import Images
from tests.training.test_training import train

DEEP = b"[" * 100_000
TENSORS = "rank-0.safetensors"


class Evil:
    """A pickle that makes the file `ran` here when it is read."""

    def __reduce__(self):
        return (os.system, ("touch ran",))


def safetensors(header: object, data: bytes = bytes(64), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def piece(shape: list[int], whole: list[float], offset: list[int]) -> bytes:
    pieces = json.dumps({"model.0.0.weight": {"shape": whole, "offset": offset}})
    return safetensors({"model.0.0.weight": entry(0, 64, shape), "__metadata__": {"pieces": pieces}})


PICKLES = {"pickle": pickle.dumps(Evil()), "old pickle": pickle.dumps(Evil(), 0)}
NONSENSE = {
    **PICKLES,
    "empty": b"",
    "deep": DEEP,
    "deep object": b'{"a":' * 100_000,
    "list": b"[]",
    "digits": b'{"step": ' + b"9" * 100_000 + b"}",
    "no text": b"\xff\xfe\x00",
}
RUN_FILES = {
    **NONSENSE,
    "infinite": b'{"task": 1e999, "fields": {"epochs": 1e999}, "restarts": 1e999}',
    "wrong kinds": b'{"task": [], "fields": [1], "versions": "x", "plan": {}, "data": 5}',
    "code": b'{"task": "os:system", "fields": {"command": "touch ran"}}',
    "its own code": b'{"task": "RUN/evil.py", "fields": {}}',
    "climbs out": b'{"task": "tests.parity.tasks:Images", "fields": {}, "data": "../../../outside"}',
}
MANIFESTS = {
    **NONSENSE,
    "climbs out": b'{"files": {"../../../outside/kept": {"bytes": 4}}, "xxh3_128": ""}',
    "absolute": b'{"files": {"/etc/passwd": {"bytes": 4}}, "xxh3_128": ""}',
    "itself": b'{"files": {".": {}, "..": {}, "": {}}, "xxh3_128": ""}',
    "null byte": b'{"files": {"a\\u0000b": {"bytes": 4}}, "xxh3_128": ""}',
    "half a pair": b'{"files": {"\\ud800": {"bytes": 4}}, "xxh3_128": ""}',
    "infinite": b'{"files": {"state.json": {"bytes": 1e999}}, "xxh3_128": ""}',
    "not a number": b'{"files": {"state.json": {"bytes": NaN}}, "xxh3_128": ""}',
    "negative": b'{"files": {"state.json": {"bytes": -1}}, "xxh3_128": ""}',
    "nothing": b'{"files": {}, "xxh3_128": ""}',
}
TENSOR_FILES = {
    **PICKLES,
    "empty": b"",
    "length": safetensors({}, length=2**64 - 1),
    "longer": safetensors({}, length=10**9),
    "deep": safetensors(DEEP),
    "negative": safetensors({"model.0.0.weight": entry(-8, 8, [4])}),
    "backwards": safetensors({"model.0.0.weight": entry(16, 0, [4])}),
    "overlapping": safetensors({"model.a": entry(0, 64, [16]), "model.b": entry(32, 64, [8])}),
    "beyond": safetensors({"model.0.0.weight": entry(0, 1 << 40, [1 << 38])}),
    "overflow": safetensors({"model.0.0.weight": entry(0, 64, [1 << 32, 1 << 32, 16])}),
    "no such type": safetensors({"model.0.0.weight": entry(0, 64, [16], "EVIL")}),
    "names": safetensors({"../../../outside/kept": entry(0, 32, [8]), "local.": entry(32, 64, [8])}),
    "local": safetensors({"local.x": entry(0, 32, [8]), "local..": entry(32, 64, [8])}),
    "huge piece": piece([16], [9e99], [0]),
    "large piece": piece([2, 2, 2, 2], [100_000, 100_000, 99, 99], [0, 0, 0, 0]),
    "another model": save({"model.x": torch.ones(1)}),
}
METRICS = {
    **NONSENSE,
    "no keys": b'{"kind": "step"}\n{"kind": "evaluation"}\n',
    "wrong kinds": b'{"kind": "step", "step": {}, "loss": []}\n{"kind": "evaluation", "step": [], "accuracy": {}}\n',
    "one line": b'{"kind": "step", "loss": "' + b"x" * (1 << 22),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("hostile") / "run", Images(epochs=1), steps=1).run


@pytest.fixture
def run(made, monkeypatch) -> Iterator[Path]:
    """A copy of a run, where nothing else may change, and with a clock that ends what hangs."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    with workplace() as here:
        yield shutil.copytree(made, here / "runs/run")
        assert [one.name for one in here.iterdir()] == ["runs"]


def told(verb: Callable[[], object]) -> str:
    """The error's words, one line; nothing when there was none. Any other exception fails the test."""
    try:
        verb()
    except GrappeError as error:
        assert str(error)
        assert "\n" not in str(error)
        return str(error)
    return ""


def look(folder: Path) -> list[str]:
    """Returns the messages of the verbs that only read a run."""
    return [
        told(lambda: listing(folder.parent)),
        told(lambda: describe(folder)),
        told(lambda: load(folder)),
        told(lambda: evaluated(folder, resolve_task(Run(folder), None), folder)),
    ]


def newest(folder: Path) -> Path:
    return Run(folder).latest().folder


def test_an_honest_run_is_read(run) -> None:
    seal(newest(run))
    assert look(run) == ["", "", "", ""]


@pytest.mark.parametrize("case", RUN_FILES)
def test_run_json(run, case: str) -> None:
    (run / "evil.py").write_text("import os\nos.system('touch ran')\n")
    (run / "run.json").write_bytes(RUN_FILES[case].replace(b"RUN", str(run).encode()))
    assert look(run)[0] == ""
    if case != "climbs out":
        assert all(look(run)[2:])


def altered(content: dict) -> Iterator[tuple[str, dict]]:
    """Yields the object with each of its entries, and of theirs, as a value of each other type in turn."""
    for name, value in content.items():
        for wrong in (None, True, 5, "x", [5], {"a": 1}):
            if type(wrong) is not type(value) or wrong == [5]:
                yield f"{name}: {wrong!r}", {**content, name: wrong}
        if isinstance(value, dict):
            yield from ((f"{name}.{place}", {**content, name: inner}) for place, inner in altered(value))


def test_each_entry_of_run_json_as_another_type(run) -> None:
    """Whoever changes run.json can give it a hash that fits: one clear line, or the command does its work."""
    description = Run(run).read_description()
    description["start"]["units"] = ["0.0"]
    description |= {"changes": ["restart 1"], "loading": {"kind": "processes", "workers": 2}, "used": {"joules": {}}}
    refused = []
    for place, content in altered(description):
        (run / "run.json").write_text(json.dumps({**content, "xxh3_128": json_hash(content)}))
        said = told(lambda: Run(run).read_description())
        if said:
            assert "run.json is damaged (" in said, place
            refused.append(place)
        else:
            told(lambda: describe(run))
        assert told(lambda: listing(run.parent)) == "", place
    for place in ("changes: 5", "plan: {'a': 1}", "versions.torch: 5", "start.units: 5", "costs: [5]"):
        assert place in refused
    for value in ([], {}, 5, "0"):
        (run / "run.json").write_text(json.dumps({**description, "xxh3_128": value}))
        assert "is damaged (its hash differs)" in told(lambda: Run(run).read_description())


def test_each_entry_of_a_state_as_another_type(run) -> None:
    """Each in one of the wrong types, as a training that resumes takes a while."""
    checkpoint = newest(run)
    state = json.loads((checkpoint / STATE).read_text())
    signal.alarm(0)
    shutil.copytree(run, run.parent / "kept")
    cases: dict[str, list] = {}
    for place, content in altered(state):
        cases.setdefault(place.partition(":")[0], []).append((place, content))
    for number, (name, of_entry) in enumerate(cases.items()):
        place, content = of_entry[number % len(of_entry)]
        shutil.rmtree(run)
        shutil.copytree(run.parent / "kept", run)
        (checkpoint / STATE).write_text(json.dumps(content))
        seal(checkpoint)
        said = told(lambda: train(run, Images(epochs=2), steps=2))
        assert not said or "state cannot be resumed from" in said or name in said, (place, said)
    shutil.rmtree(run.parent / "kept")


@pytest.mark.parametrize("case", MANIFESTS)
def test_manifest(run, case: str) -> None:
    checkpoint = newest(run)
    (checkpoint / MANIFEST).write_bytes(MANIFESTS[case])
    assert newest(run).name == "step-000000"  # the one before
    assert look(run) == ["", "", "", ""]


@pytest.mark.parametrize("case", TENSOR_FILES)
def test_tensors(run, case: str) -> None:
    checkpoint = newest(run)
    (checkpoint / TENSORS).write_bytes(TENSOR_FILES[case])
    assert newest(run).name == "step-000000"
    seal(checkpoint)
    assert newest(run) == checkpoint
    looked = look(run)
    assert looked[:2] == ["", ""]
    assert all(looked[2:])


@pytest.mark.parametrize("case", NONSENSE)
def test_state(run, case: str) -> None:
    checkpoint = newest(run)
    (checkpoint / STATE).write_bytes(NONSENSE[case])
    seal(checkpoint)
    assert look(run) == ["", "", "", ""]  # weights need no state
    if case != "digits":
        assert "state.json" in told(lambda: Run(run).latest().read_values())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "values",
    [{"engine": []}, {"engine": {"optimizer": {"0.0.weight": 5}}}, {"engine": {}, "patience": 5}],
    ids=["engine", "optimizer", "patience"],
)
def test_a_state_that_no_training_can_go_on_from(run, values: dict) -> None:
    checkpoint = newest(run)
    known = json.loads((checkpoint / STATE).read_text())
    (checkpoint / STATE).write_text(json.dumps({**known, **values}))
    seal(checkpoint)
    signal.alarm(0)
    words = told(lambda: train(run, Images(epochs=2), steps=2))
    assert "verifies, but its state cannot be resumed from" in words
    assert f"--from {run}" in words


@pytest.mark.parametrize("case", METRICS)
def test_metrics(run, case: str) -> None:
    (run / "metrics.jsonl").write_bytes(METRICS[case])
    assert look(run) == ["", "", "", ""]
    Run(run).cut_back(0)


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", STATE, MANIFEST, TENSORS])
@pytest.mark.parametrize("kind", ["pipe", "folder", "link out", "endless"])
def test_what_is_no_file(run, name: str, kind: str) -> None:
    file = run / name if (run / name).exists() else newest(run) / name
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero" if kind == "endless" else run.parents[2] / "outside/kept")
    look(run)


def test_the_bait_is_live(here) -> None:
    for text in PICKLES.values():
        pickle.loads(text)
        (here / "ran").unlink()
