"""grappe doctor --passport: what is measured of this machine, and how two machines compare."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from grappe.contrib.doctor import passport
from grappe.contrib.doctor.passport import Passport
from grappe.errors import EXIT_OK
from grappe.launch.rank import ProcessRank
from tests.processes import Pool
from tests.typed import grappe, refused

OLD = {"memory, GB/s": (96.0, 97.0, 98.0), "disk read, GB/s": (2.0, 2.1, 2.2), "disk write, GB/s": (1.0, 1.1, 1.2)}


def one(host: str, figures: Mapping[str, Sequence[float]], device: str = "AMD EPYC") -> Passport:
    known = {name: tuple(speeds) for name, speeds in figures.items()}
    return Passport(host=host, date="2026-12-01T000000Z", device=device, figures=known)


def kept(file: Path, measured: Passport) -> Path:
    file.write_text(json.dumps({"grappe": "0.1.0", "form": 1, **dataclasses.asdict(measured)}))
    return file


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("REPEATS", 2), ("COPIED", {"cpu": 1 << 20}), ("ON_DISK", 1 << 20), ("REDUCED", 1 << 16)):
        monkeypatch.setattr(passport, name, value)
    monkeypatch.setattr(passport, "reachable_by_precision", lambda device, plan: {"fp32": 3e10})


def measured(process: ProcessRank, rendezvous_folder: Path, folder: Path) -> Passport:
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        return passport.worker(folder, process, rendezvous_folder)


def test_two_processes_measure_their_machine(pool: Pool, tmp_path: Path) -> None:
    found, _ = pool.run("tests.contrib.doctor.test_passport:measured", 2, tmp_path)
    names = ["matrix product in fp32, TFLOP/s", "memory, GB/s", "disk write, GB/s", "disk read, GB/s"]
    assert list(found.figures) == [*names, "all-reduce of 2 processes, GB/s"]
    for speeds in found.figures.values():
        assert len(speeds) == 2
        assert all(1e-6 < speed < 1e5 for speed in speeds)
    assert found.figures[names[0]] == (0.03, 0.03)
    assert list(tmp_path.glob("*")) == [], "the measured file is gone"


def test_the_slowest_node_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Nodes:
        size = 1

        def gather(self, own: dict) -> list[dict]:
            return [own, {**own, "memory, GB/s": (1e-5, 2e-5)}, {}]

        def leave(self) -> None: ...

    small(monkeypatch)
    monkeypatch.setattr(passport, "join", lambda *_: Nodes())
    assert passport.worker(tmp_path, ProcessRank(), tmp_path).figures["memory, GB/s"] == (1e-5, 2e-5)


def test_a_gpu_has_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The GPU is a stand-in: what is copied lies in the host's memory."""
    small(monkeypatch)
    monkeypatch.setattr(passport, "COPIED", {"cuda": 1 << 20})
    monkeypatch.setattr(passport, "choose_device", lambda plan, process: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    ones: Callable[..., torch.Tensor] = torch.ones
    monkeypatch.setattr(torch, "ones", lambda size, *, dtype, **_: ones(size, dtype=dtype))
    monkeypatch.setattr(passport, "join", lambda *_: Alone())
    found = passport.worker(tmp_path, ProcessRank(), tmp_path)
    assert {"host to GPU, GB/s", "GPU to host, GB/s"} < set(found.figures)
    assert found.device == "NVIDIA H200"


class Alone:
    """The world of one process."""

    size = 1

    def gather(self, own: dict) -> list[dict]:
        return [own]

    def leave(self) -> None: ...


def test_figures_in_words_beside_the_data_sheet() -> None:
    gpu = {"matrix product in bf16, TFLOP/s": (742.0,), "memory, GB/s": (3000, 3600, 3700), "disk read, GB/s": (1.0,)}
    assert list(passport.lines(one("n1", gpu, "NVIDIA H200"))) == [
        "matrix product in bf16: 742 TFLOP/s (742 to 742), 75% of the data sheet's 989.5",
        "memory: 3600 GB/s (3000 to 3700), 75% of the data sheet's 4800",
        "disk read: 1 GB/s (1 to 1)",
    ]
    assert list(passport.lines(one("n1", {"memory, GB/s": (12.0,)}))) == ["memory: 12 GB/s (12 to 12)"]


def test_the_largest_difference_comes_first_and_within_the_spread_there_is_no_verdict() -> None:
    here = {"disk write, GB/s": (0.5, 0.6, 1.05), "disk read, GB/s": (2.0, 2.2, 2.3), "memory, GB/s": (11, 12, 13)}
    assert passport.compare(one("here", here), one("narval", {**OLD, "host to GPU, GB/s": (20.0,)})) == [
        "memory 8.1 times slower than on narval: 12 GB/s, there 97",
        "disk read: as fast, within 10 %: 2.2 GB/s, there 2.1",
        "disk write: no verdict, a machine is busy: 0.5 to 1.05 GB/s, there 1 to 1.2",
        "host to GPU: not measured here",
    ]
    faster = passport.compare(one("here", {"memory, GB/s": (200.0,)}), one("old\x1b[2J", {"memory, GB/s": (100.0,)}))
    assert faster == ["memory 2.0 times faster than on old\\x1b[2J: 200 GB/s, there 100"]


def test_two_files_are_compared_and_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    old, new = kept(tmp_path / "old.json", one("narval", OLD)), tmp_path / "new.json"
    kept(new, one("nibi", {**OLD, "memory, GB/s": (12.1,)}))
    assert grappe("doctor", "--compare", str(old), str(new)) == EXIT_OK
    assert capsys.readouterr().out.splitlines()[0] == "memory 8.0 times slower than on narval: 12.1 GB/s, there 97"
    assert grappe("doctor", "--compare", str(old), str(new), "--json") == EXIT_OK
    answer = json.loads(capsys.readouterr().out)
    assert (answer["kind"], answer["host"], len(answer["lines"])) == ("passport", "nibi", 3)


def test_a_passport_is_kept_in_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(passport, "measure", lambda folder: one("nibi", OLD))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert grappe("doctor", "--passport") == EXIT_OK
    file = Path("runs") / "passport-nibi-2026-12-01T000000Z.json"
    assert capsys.readouterr().out.splitlines()[-1] == f"kept in {file}"
    assert passport.read(file.resolve()) == one("nibi", OLD)
    assert grappe("doctor", "--compare", str(file.resolve()), "--out", "mine.json") == EXIT_OK
    assert passport.read(tmp_path / "mine.json").host == "nibi"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"kind": "measurement", "points": []}',
        json.dumps(dataclasses.asdict(one("a", OLD)) | {"kind": "gpu"}),
        json.dumps(dataclasses.asdict(one("a", {"memory, GB/s": ()}))),
        json.dumps(dataclasses.asdict(one("a", {"memory, GB/s": (0.0,)}))),
        json.dumps(dataclasses.asdict(one("a", {"memory, GB/s": (1e13,)}))),
    ],
)
def test_a_foreign_file_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(content)
    assert "is no file of grappe doctor --passport" in refused("doctor", "--compare", str(tmp_path / "old.json"))


def test_other_words_and_a_file_that_is_not_there_are_refused(tmp_path: Path) -> None:
    assert "leave out others" in refused("doctor", "--passport", "--gpu")
    assert "leave out others" in refused("doctor", "--out", "a.json")
    assert "leave out others" in refused("doctor", "--compare", "a", "b", "c")
    assert "is no file of grappe doctor" in refused("doctor", "--compare", str(tmp_path / "none.json"))
