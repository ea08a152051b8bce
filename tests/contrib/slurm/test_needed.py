"""Packages that a job needs: the engine's and the loggers' packages, the task's imports, and the user's requests."""

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from grappe import engines, sites
from grappe.contrib.slurm.environment import modules_of
from grappe.contrib.slurm.packages import TORCH, job_packages, requirements
from grappe.contrib.slurm.resources import Submission
from grappe.errors import UsageError
from grappe.plan import Plan
from grappe.sites.sbatch import JobOptions


def submitted(task: str | None = None, loggers: tuple[str, ...] = (), **options: Any) -> Submission:
    return Submission(task=task, arguments=(), loggers=loggers, job=JobOptions(**options))


def test_every_engine_with_a_library_of_its_own_has_an_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    with_library = set(engines.names()) - {"native", "textbook"}
    assert with_library <= set(project["optional-dependencies"])


def test_the_users_request_wins_over_what_was_read(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sklearn, numpy, torch, pandas")
    task = str(tmp_path / "mine.py")
    assert requirements(submitted(task)) == ["pandas", "scikit-learn"]
    found = requirements(submitted(task, with_=("Scikit_Learn==1.5", "torch==2.11.0")))
    assert found == ["pandas", "Scikit_Learn==1.5", "torch==2.11.0"]


@pytest.mark.parametrize("run", [None, Path("runs/new")])
def test_a_launched_script_has_its_packages_too(run: Path | None, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch, timm, yaml")
    launched = Submission(command="launch", arguments=("--plan", "replicate=2", "--", str(script)), run=run)
    assert requirements(launched) == ["PyYAML", "timm"]


@pytest.mark.parametrize("text", ["a b", "-r x", "--index-url=x", "a;b", "git+https://x", "../x", "$(x)", "", "a=1"])
def test_what_is_no_package_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--with"):
        requirements(submitted(with_=(text,)))


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("with_", "torch==1.9.1"),
        ("with_", "torch<=2.7.1"),
        ("with_", "torchtext"),
        ("modules", "pytorch-gpu/py3/1.11.0"),
        ("modules", "pytorch/2.7"),
    ],
)
def test_what_ended_before_grappes_torch_is_refused(option: str, text: str) -> None:
    with pytest.raises(UsageError, match=rf"--{option.rstrip('_')} {re.escape(text)}: .*2\.8"):
        requirements(submitted(**{option: (text,)}))


def test_newer_torches_are_taken() -> None:
    texts = ("torch==2.10.0", "torch<2.9", "torch~=2.0", "torch>=1.9", "torch==2.*")
    assert requirements(submitted(with_=texts, modules=("pytorch-gpu/py3/2.8.0", "python/3.11"))) == list(texts)
    assert f"torch>={TORCH[0]}.{TORCH[1]}" in importlib.metadata.requires("grappe")  # type: ignore[operator]


def test_a_file_of_requirements(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        requirements(submitted(requirements=tmp_path / "none.txt"))
    (tmp_path / "some.txt").write_text("x\n")
    assert requirements(submitted(requirements=tmp_path / "some.txt")) == [f"-r {tmp_path}/some.txt"]


def test_equal_packages_are_one_environment() -> None:
    site = sites.find("narval")
    one, why = job_packages(submitted("digits"), site, Plan(engine="lightning"), show=True)
    same, _ = job_packages(submitted("digits"), site, Plan(engine="lightning"), show=True)
    other, _ = job_packages(submitted("digits", ("wandb",)), site, Plan(), show=True)
    assert one and same and other and why
    assert not one.locked
    assert one.key == same.key != other.key
    text = one.files["requirements.txt"].decode()
    assert "lightning" in text
    assert "wandb" not in text
    assert "scikit-learn" in text
    assert [name for name in one.files if name.endswith(".whl")]


@pytest.mark.slow
def test_deepspeed_has_its_package_and_cudas_module_on_gpus_alone() -> None:
    site = sites.find("narval")
    for text, package, modules in (
        ("engine=deepspeed,shard=2", True, ("python/3.11", "cuda")),
        ("engine=lightning,shard=2,offload=cpu", True, ("python/3.11", "cuda")),
        ("engine=deepspeed,shard=2,device=cpu", True, ("python/3.11",)),
        ("engine=lightning,shard=2", False, ("python/3.11",)),
    ):
        plan = Plan.parse(text)
        content, _ = job_packages(submitted("digits"), site, plan, show=True)
        assert ("deepspeed" in content.files["requirements.txt"].decode()) is package
        assert modules_of(site, (), plan) == modules
        assert modules_of(site, ("mine",), plan) == ("mine",)
