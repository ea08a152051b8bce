"""The supply chain: a bill of materials, requirements with hashes, and no file that is unpickled."""

import ast
import base64
import hashlib
import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

import grappe
from grappe import private_api

ROOT = Path(__file__).parent.parent
SOURCE = Path(grappe.__file__).parent


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def installed(folder: Path, content: bytes) -> importlib.metadata.Distribution:
    """A package of one file, as pip leaves it."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    (folder / "a.py").write_bytes(content)
    (folder / "a-1.0.dist-info").mkdir()
    (folder / "a-1.0.dist-info/METADATA").write_text("Name: a\nVersion: 1.0\nLicense-Expression: MIT\n")
    (folder / "a-1.0.dist-info/RECORD").write_text(f"a.py,sha256={digest},{len(content)}\n")
    return next(iter(importlib.metadata.distributions(path=[str(folder)])))


def test_a_bill_of_materials_names_what_was_changed(tmp_path: Path) -> None:
    sbom = script("sbom")
    one = installed(tmp_path, b"x = 1\n")
    assert list(sbom.differing(one)) == []
    (tmp_path / "a.py").write_text("x = 2\n")
    assert list(sbom.differing(one)) == ["a.py"]
    found = sbom.component("a", one, ["a.py"])
    assert found["purl"] == "pkg:pypi/a@1.0"
    assert found["licenses"] == [{"license": {"name": "MIT"}}]
    assert found["properties"] == [{"name": "changed", "value": "a.py"}]
    json.dumps(found)


def test_requirements_with_hashes() -> None:
    lock = script("lock")
    known = {"metadata": {"name": "b", "version": "2"}, "download_info": {"archive_info": {"hashes": {"sha256": "0f"}}}}
    project = {"metadata": {"name": "grappe", "version": "0"}, "download_info": {"dir_info": {}}}
    assert list(lock.lines({"install": [known, project]})) == ["b==2 --hash=sha256:0f"]
    with pytest.raises(SystemExit, match="no sha256"):
        list(lock.lines({"install": [{**known, "download_info": {"vcs_info": {}}}]}))


def test_new_constraints_name_no_build_for_gpus() -> None:
    names = ("torch", "nvidia-cublas", "nvidia-ml-py", "triton", "cuda-toolkit")
    report = {"install": [{"metadata": {"name": name, "version": "2+cu1"}, "download_info": {}} for name in names]}
    assert list(script("lock").versions(report))[1:] == ["nvidia-ml-py==2", "torch==2"]
    assert (ROOT / "constraints.txt").read_text().startswith(script("lock").HEAD)


def test_the_table_of_versions_is_what_is_tested() -> None:
    oldest, newest = (".".join(map(str, release)) for release in (private_api.OLDEST, private_api.NEWEST))
    makefile = (ROOT / "Makefile").read_text()
    assert f"TORCH_oldest := =={oldest}.0" in makefile
    assert f"<{private_api.NEWEST[0]}.{private_api.NEWEST[1] + 1}\n" in makefile
    assert f'"torch>={oldest}"' in (ROOT / "pyproject.toml").read_text()
    (pin,) = re.findall(r"(?m)^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text())
    for page in ("docs/promises.md", "docs/fr/promises.md"):
        rows = re.findall(r"(?m)^\| torch ([\d. to-]+) \|", (ROOT / page).read_text().replace(" à ", " to "))
        assert rows[0] == oldest and pin in rows and rows[-1].endswith(f" {newest}"), page


def test_every_dependency_is_pinned() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    names = {re.sub(r"[-_.]+", "-", name).lower() for name in pins}
    needed = "torch numpy pillow safetensors torchmetrics cyclopts rich cloudpickle xxhash msgspec"
    assert set(needed.split()) <= names


def test_nothing_that_grappe_reads_is_unpickled() -> None:
    """torch and numpy unpickle where they are let; import-linter keeps pickle itself and its kin out."""
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name, words = ast.unparse(node.func), {one.arg: ast.unparse(one.value) for one in node.keywords}
            if name == "torch.load":
                assert words.get("weights_only") == "True", file
            if name in ("np.load", "numpy.load"):
                assert words.get("allow_pickle") == "False", file
            if name in ("cloudpickle.loads", "cloudpickle.load"):
                assert file.parent.name == "launch", f"{file}: only what this command's own processes sent"
            if name == "torch.jit.load":
                assert file.name == "exchange.py", f"{file}: only what this command wrote, by its hash"
            assert name not in ("eval", "exec", "torch.hub.load", "yaml.load"), file
