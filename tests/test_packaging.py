"""The recipes of conda-forge and EasyBuild, and all places with a version, agree with pyproject.toml.

What only their own tools can tell is no test here, as no package index has them all: `rattler-build` parses and renders
the conda recipe (py-rattler-build 0.73), conda-smithy's linter asks for maintainers alone, and EasyBuild 5.4.1 passes
`eb --check-style`, `--check-contrib` and finds each dependency (`eb --robot -D`).
"""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]
NEEDS = {canonicalize_name(need.name): need for need in map(Requirement, PROJECT["dependencies"])}
LOWEST_PYTHON = PROJECT["requires-python"].removeprefix(">=")
CONDA = ROOT / "packaging/conda/recipe.yaml"
[EASYBUILD] = (ROOT / "packaging/easybuild").iterdir()
CONDA_NAMES = {"torch": "pytorch", "xxhash": "python-xxhash"}
MODULES = {"torch": "PyTorch", "pillow": "Pillow", "safetensors": "Safetensors", "xxhash": "python-xxhash"}
BUNDLES = {"Python-bundle-PyPI": ("rich", "cloudpickle"), "SciPy-bundle": ("numpy",)}
NO_DIGEST = "0" * 64


def conda() -> dict:
    return yaml.safe_load(CONDA.read_text())


def easybuild() -> dict:
    """The parameters of the easyconfig, which is Python, read as literals."""
    names: dict = {}
    for node in ast.parse(EASYBUILD.read_text()).body:
        text = ast.unparse(node.value).replace("(name, version,", f"({names.get('name')!r}, {names.get('version')!r},")
        names[node.targets[0].id] = ast.literal_eval(text)
    return names


def test_one_version() -> None:
    import grappe

    assert grappe.__version__ == VERSION
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(r"(?m)^## (\S+)", (ROOT / "CHANGELOG.md").read_text())[1].rstrip(",") == VERSION
    assert conda()["context"]["version"] == VERSION
    assert easybuild()["version"] == VERSION
    assert EASYBUILD.name == f"grappe-{VERSION}-foss-{easybuild()['toolchain']['version']}.eb"


def test_condas_recipe_needs_what_the_project_needs() -> None:
    requirements = conda()["requirements"]
    expected = [f"{CONDA_NAMES.get(name, name)} {need.specifier}" for name, need in NEEDS.items()]
    assert requirements["run"] == ["python >=${{ python_min }}", *expected]
    [build] = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert requirements["host"][-1] == build.replace(">=", " >=")
    assert conda()["context"]["python_min"] == LOWEST_PYTHON
    demo = conda()["tests"][1]["requirements"]["run"][-1]
    assert [demo.replace(" ", "")] == PROJECT["optional-dependencies"]["demo"]


def test_condas_recipe_describes_the_project() -> None:
    recipe = conda()
    assert recipe["build"]["python"]["entry_points"] == [f"{name} = {to}" for name, to in PROJECT["scripts"].items()]
    about = recipe["about"]
    assert about["summary"] == PROJECT["description"]
    assert about["license"] == PROJECT["license"]
    assert (ROOT / about["license_file"]).is_file()
    assert recipe["source"]["sha256"] == NO_DIGEST
    assert recipe["source"]["url"] == about["homepage"] + "/grappe-${{ version }}.tar.gz"


def test_easybuilds_recipe_has_what_the_project_needs() -> None:
    recipe = easybuild()
    modules = dict(recipe["dependencies"])
    versions = {canonicalize_name(name): version for name, version, _ in recipe["exts_list"]}
    versions |= {name: modules[module] for name, module in MODULES.items()}
    for module, names in BUNDLES.items():
        comment = re.search(rf"\('{module}', '\S+'\),  # (.*)", EASYBUILD.read_text())[1]
        provided = dict(entry.split() for entry in comment.split(", "))
        assert module in modules
        assert tuple(provided) == names
        versions |= provided
    assert {name for name, need in NEEDS.items() if not need.specifier.contains(versions[name])} == set()
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(modules["Python"])


def test_easybuilds_recipe_describes_the_project() -> None:
    recipe = easybuild()
    assert recipe["description"] == PROJECT["description"]
    assert recipe["sanity_check_paths"]["files"] == [f"bin/{name}" for name in PROJECT["scripts"]]
    assert recipe["homepage"] == conda()["about"]["homepage"]
    name, version, rest = recipe["exts_list"][-1]
    assert (name, version) == ("grappe", VERSION)
    assert rest == {"source_urls": [recipe["homepage"]], "checksums": [NO_DIGEST]}


@pytest.mark.parametrize("path", [CONDA, EASYBUILD], ids=["conda", "easybuild"])
def test_make_wheel_writes_the_digest_and_the_address(path: Path, tmp_path: Path) -> None:
    """The lines of the Makefile, which sh runs as make would."""
    makefile = (ROOT / "Makefile").read_text()
    [line] = re.findall(r"\tsed (-e .*) (?:\S+) >", makefile)
    line = line.replace("$$digest", "f" * 64).replace("$(URL)", "https://example.com/r")
    done = subprocess.run(["sh", "-c", f"sed {line} {path}"], capture_output=True, text=True, check=True)
    assert done.stdout.count("f" * 64) == 1
    assert NO_DIGEST not in done.stdout
    assert done.stdout.count("https://example.com/r") == 2
