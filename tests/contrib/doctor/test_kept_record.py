"""grappe doctor --record: nothing is said of the same machine; a change is named, with a command that compares."""

import shlex
from pathlib import Path

import msgspec

from grappe.contrib.doctor.checks import Finding, Machine, kept_record
from grappe.contrib.lab import record
from grappe.launch.rank import ProcessRank
from grappe.plan import Plan
from tests.commands import GRAPPE, ran


def grappe(folder: Path, *words: str) -> tuple[int, str, str]:
    done = ran(GRAPPE, *words, cwd=folder, XDG_STATE_HOME=str(folder))
    return done.returncode, done.stdout, done.stderr


def found(**changes: object) -> list[Finding]:
    known = {"folder": Path("/tmp"), "environment": {}, "process": ProcessRank(), **changes}
    return list(kept_record.check_kept_record(Machine(plan=Plan.parse("device=cpu"), **known)))


def test_a_change_since_the_record_is_named_with_a_command_that_compares(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert not found(), "nobody has recorded"
    code, out, err = grappe(tmp_path, "doctor", "digits", "batch_size=16", "--record", "--plan", "device=cpu")
    assert code == 0, err
    file = tmp_path / "grappe/machines/generic-cpu.record"
    assert (out, file.stat().st_size < 200_000) == (f"recorded in {file}\n", True)
    assert not found(), "the same machine"

    there = record.read(file)
    machine = {**there.header.machine, "torch": "2.3.1", "container": "pytorch\x1b[31m.sif", "threads": "64"}
    header = msgspec.structs.replace(there.header, machine=machine)
    record.write(record.Recorded(**{**vars(there), "header": header}), file)
    [finding] = found()
    assert finding.level == "warning"
    assert "torch: 2.3.1 -> 2." in finding.what and r"container: pytorch\x1b[31m.sif -> none" in finding.what
    assert "threads" not in finding.what
    assert not found(job=True)

    command, _, rest = finding.do.partition(" compares; ")
    assert rest == "then grappe doctor --record keeps a new one"
    code, out, err = grappe(tmp_path, *shlex.split(command)[1:])
    assert code == 0, err
    assert out.startswith("same") and "torch: 2.3.1 -> 2." in out
