"""Packages resolved by a real pip against a folder of wheels: all that it lacks is named, with the fix."""

import dataclasses
import importlib.metadata
import os
import sys
from pathlib import Path

import pytest

from grappe import sites
from grappe.contrib.slurm.environment import Packages, own_wheel
from grappe.contrib.slurm.packages import Unresolvable, Wheelhouse, resolve, torch_of
from grappe.errors import UsageError
from tests.contrib.slurm.golden import script, with_job
from tests.typed import stand_in
from tests.wheelhouse import wheel, wheelhouse


def house(wheels: Path, *modules: str) -> Wheelhouse:
    return Wheelhouse(modules=modules, wheels=wheels, on_modules=False, site="narval")


@pytest.fixture(autouse=True)
def no_other_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


def test_everything_is_there(tmp_path: Path) -> None:
    wheelhouse(tmp_path)
    wheel(tmp_path, "extra", "2.0")
    wheel(tmp_path, "extra", "1.0")
    found, _ = resolve(own_wheel(), [], ["scikit-learn", "extra==1.0"], house(tmp_path))
    assert "extra==1.0" in found
    assert any(one.startswith("torch==") for one in found)
    assert not any(one.startswith("grappe") for one in found)


@pytest.mark.slow
def test_all_that_is_missing_is_named_with_what_it_needs_in_turn(tmp_path: Path, capsys) -> None:
    wheelhouse(tmp_path, lacks=("cyclopts", "docstring-parser"))
    wheel(tmp_path, "extra", "1.0")
    with pytest.raises(UsageError) as refusal:
        resolve(own_wheel(), [], ["scikit-learn", "extra==2.0"], house(tmp_path))
    said, err = str(refusal.value), capsys.readouterr().err
    assert "asking pip which packages the wheels of narval have (0 missing so far)\n" in err and "(3 mis" in err
    assert "the wheels of narval lack 3 packages, and nothing was submitted" in said
    assert "extra==2.0: there is 1.0" in said
    assert "cyclopts>=4, which grappe needs: there is none" in said
    assert ", which cyclopts needs: there is none" in said
    assert f"python -m pip download --no-deps --dest {tmp_path} extra==2.0 'cyclopts>=4'" in said
    assert "--with NAME==VERSION" in said


def test_packages_that_do_not_fit_each_other(tmp_path: Path) -> None:
    wheelhouse(tmp_path)
    wheel(tmp_path, "one", "1.0", ["shared==1"])
    wheel(tmp_path, "two", "1.0", ["shared==2"])
    for version in ("1", "2"):
        wheel(tmp_path, "shared", version)
    with pytest.raises(UsageError, match="are not compatible with each other") as refusal:
        resolve(own_wheel(), [], ["one", "two"], house(tmp_path))
    assert "  Cannot install one==1.0 and two==1.0" in str(refusal.value)


def test_modules_are_loaded_and_their_names_are_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheelhouse(tmp_path / "wheels")
    function = f'() {{ echo "$*" >> {tmp_path}/said; [ "$2" != none ] || {{ echo "unknown: none" >&2; return 1; }}; }}'
    monkeypatch.setenv("BASH_FUNC_module%%", function)
    resolve(own_wheel(), [], [], house(tmp_path / "wheels", "python/3.11", "$(touch hacked)"))
    assert (tmp_path / "said").read_text() == "purge\nload python/3.11 $(touch hacked)\n"
    with pytest.raises(UsageError, match=r"--modules none: unknown: none\n  module avail"):
        resolve(own_wheel(), [], [], house(tmp_path / "wheels", "none"))


def test_a_machine_without_modules_resolves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Unresolvable, match="narval's login node"):
        resolve(own_wheel(), [], [], house(tmp_path, "python/3.11"))


def test_the_torch_of_a_job_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip resolved it, as installed, or of the modules."""
    own = importlib.metadata.version("torch")
    site = script(sites.find("narval"), "1-gpu")

    def named(env: str, requirements: str = "", *, locked: bool = True) -> str:
        content = Packages(files={"requirements.txt": requirements.encode()}, key="0", locked=locked)
        made = env in ("virtualenv", "module")
        return torch_of(dataclasses.replace(with_job(site, env=env), packages=content if made else None))

    assert named("here") == named(sys.prefix) == f"torch {own}, as installed"
    assert named("conda:x") == named("virtualenv", "torch>=2.8\n", locked=False) == ""
    assert named("virtualenv", "numpy==2\ntorch==2.9.1+x\n") == "torch 2.9.1+x, from wheels"
    monkeypatch.setenv("BASH_FUNC_module%%", "() { :; }")
    stand_in(tmp_path, monkeypatch, python=f'exec {sys.executable} "$@"')
    assert named("module", "numpy==2\n") == f"torch {own}, of the modules"
