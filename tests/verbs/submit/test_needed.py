"""Packages that a job needs: the engine's and the loggers' packages, the task's imports, and the user's requests."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from grappe import engines
from grappe.errors import UsageError
from grappe.verbs.submit.packages import PackageRequests, Wheelhouse, prepare, requirements

HOUSE = Wheelhouse(modules=(), wheels=None, on_modules=False, site="here")


def test_every_engine_with_a_library_of_its_own_has_an_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    with_library = set(engines.names()) - {"native", "textbook"}
    assert with_library <= set(project["optional-dependencies"])


def test_the_users_request_wins_over_what_was_read(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sklearn, numpy, torch, pandas")
    task = str(tmp_path / "mine.py")
    assert requirements(PackageRequests(task=task)) == ["pandas", "scikit-learn"]
    found = requirements(PackageRequests(task=task, requested=("Scikit_Learn==1.5", "torch==2.11.0")))
    assert found == ["pandas", "Scikit_Learn==1.5", "torch==2.11.0"]


@pytest.mark.parametrize(
    "text", ["a b", "-r x", "--index-url=x", "a;b", "git+https://x", "../x", "$(x)", "", "a=1"]
)
def test_what_is_no_package_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--with"):
        requirements(PackageRequests(requested=(text,)))


def test_a_file_of_requirements(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        requirements(PackageRequests(file=tmp_path / "none.txt"))
    (tmp_path / "some.txt").write_text("x\n")
    assert requirements(PackageRequests(file=tmp_path / "some.txt")) == [f"-r {tmp_path}/some.txt"]


def test_equal_packages_are_one_environment() -> None:
    one, why = prepare(PackageRequests(task="digits", features=("lightning",)), HOUSE, ask_pip=False)
    same, _ = prepare(PackageRequests(task="digits", features=("lightning",)), HOUSE, ask_pip=False)
    other, _ = prepare(PackageRequests(task="digits", features=("native", "wandb")), HOUSE, ask_pip=False)
    assert why
    assert not one.locked
    assert one.key == same.key != other.key
    text = one.files["requirements.txt"].decode()
    assert "lightning" in text
    assert "wandb" not in text
    assert "scikit-learn" in text
    assert [name for name in one.files if name.endswith(".whl")]
