"""The doctor's checks of compilers and extensions, with real compilers and libraries that the test builds."""

import subprocess
import sysconfig
from pathlib import Path

import pytest

from grappe.contrib.doctor.checks import Finding, Machine, cpp
from grappe.launch.rank import ProcessRank
from grappe.plan import Plan
from tests import needs

APT = "install one: apt install g++, or conda install gxx"


def words(found) -> str:
    return "; ".join(f"{one.level}: {one.what} | {one.why} | {one.do}" for one in found)


def examine(check, plan: str = "", **changes) -> list[Finding]:
    known = {"folder": Path("/tmp"), "job": False, "environment": {}, **changes}
    return list(check(Machine(process=ProcessRank(), plan=Plan.parse(plan), **known)))


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert words(examine(cpp.check_compiler)).startswith("note: there is no C++ compiler on the PATH")
    assert words(examine(cpp.check_compiler, "compile,device=cpu")).startswith("error: ")
    assert words(examine(cpp.check_compiler, "engine=deepspeed")).startswith("warning: ")  # its kernels are optional
    disk = "engine=deepspeed,offload=nvme:/tmp,shard=2"
    assert words(examine(cpp.check_compiler, disk)).startswith("error: ")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert words(examine(cpp.check_compiler, "compile")).startswith("warning: ")


def stand_in(folder: Path, body: str) -> Path:
    file = folder / "g++-of-old"
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)
    return file


def test_a_compiler_that_is_too_old(tmp_path: Path) -> None:
    """As gcc 8 says it."""
    old = stand_in(
        tmp_path,
        '[ "$1" = --version ] && echo "g++ (GCC) 8.5.0 20210514 (Red Hat 8.5.0-28)" && exit\n'
        "echo \"g++: error: unrecognized command line option '-std=c++20'\" >&2; exit 1",
    )
    found = examine(cpp.check_compiler, environment={"CXX": str(old)})
    assert f"warning: the C++ compiler {old} (gcc 8.5.0) does not fit" in words(found)
    assert APT in words(found)
    assert examine(cpp.check_compiler, "compile,device=cpu", environment={"CXX": str(old)})[0].level == "error"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0", ("gcc", (12, 2, 0))),
        ("g++ (GCC) 8.5.0 20210514 (Red Hat 8.5.0-28)", ("gcc", (8, 5, 0))),
        ("Ubuntu clang version 14.0.0-1ubuntu1", ("clang", (14, 0, 0))),
        ("a compiler", ("gcc", ())),
    ],
)
def test_versions_of_compilers(line: str, said: tuple[str, tuple[int, ...]], tmp_path: Path) -> None:
    assert cpp.compiler_version(str(stand_in(tmp_path, f"echo '{line}'"))) == said


def test_pythons_headers(tmp_path: Path) -> None:
    assert not list(cpp.of_headers(Path(sysconfig.get_paths()["include"]), APT, "note"))
    assert "python3-dev" in words(cpp.of_headers(tmp_path, APT, "note"))
    load = "module load gcc python/3.11"
    assert f"error: there is no Python.h in {tmp_path}" in words(cpp.of_headers(tmp_path, load, "error"))
    assert load in words(cpp.of_headers(tmp_path, load, "error"))


def test_the_sites_modules_are_named() -> None:
    assert cpp.compiler_remedy({"CC_CLUSTER": "narval"}) == "module load gcc python/3.11"
    assert cpp.compiler_remedy({"MODULESHOME": "/opt/modules"}) == "module load gcc"
    assert cpp.compiler_remedy({}) == APT


def test_nvcc() -> None:
    bounds = ((6, 0, 0), (14, 0))
    assert not list(cpp.of_cuda("12.4", "12.8", ("gcc", (13, 2, 0)), bounds))
    assert "nvcc is of CUDA 11.8, and torch is built for 12.8" in words(
        cpp.of_cuda("11.8", "12.8", ("gcc", (13, 2, 0)), None)
    )
    assert "nvcc 12.4 takes no gcc 14.2.0 | it takes gcc from 6.0.0, and before 14.0" in words(
        cpp.of_cuda("12.4", "12.8", ("gcc", (14, 2, 0)), bounds)
    )


@pytest.fixture
def library(tmp_path: Path):
    """Builds a shared library beside a task, from C++."""
    needs.compiler()

    def build(name: str, source: str, *flags: str) -> Path:
        (tmp_path / f"{name}.cpp").write_text(source)
        command = ["g++", "-shared", "-fPIC", f"{name}.cpp", "-o", f"{name}.so", *flags]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        return tmp_path / f"{name}.so"

    (tmp_path / "task.py").write_text("")
    return build


def beside(folder: Path) -> str:
    """Returns what is found of the libraries in `folder`: other tests' packages are not of interest."""
    found = examine(cpp.check_extensions, task=f"{folder / 'task.py'}:Mine")
    return words(one for one in found if str(folder) in one.what)


def test_a_library_that_is_missing(library, tmp_path: Path) -> None:
    gone = library("libgone", "int there() { return 1; }")
    library("uses", "int there(); int use() { return there(); }", f"-L{tmp_path}", "-l:libgone.so")
    assert "uses.so needs libgone.so" in beside(tmp_path)  # in no folder of the linker's
    gone.unlink()
    assert f"{tmp_path}/uses.so needs libgone.so: not found by the dynamic linker" in beside(tmp_path)
    assert "LD_LIBRARY_PATH" in beside(tmp_path)


def test_an_extension_for_another_torch(library, tmp_path: Path) -> None:
    library("other", "namespace c10 { void not_here(int); }\nvoid use() { c10::not_here(1); }")
    found = beside(tmp_path)
    assert "other.so needs _ZN3c108not_hereEi, which no library has" in found
    assert "built for another torch than" in found
    assert "pip install --no-build-isolation --force-reinstall" in found


def test_an_extension_that_fits(library, tmp_path: Path) -> None:
    """Functions of the interpreter, and of torch's libraries, are there when it is imported."""
    include = sysconfig.get_paths()["include"]
    source = "#include <Python.h>\nPyObject* use() { return PyLong_FromLong(1); }"
    library("fits", source, f"-I{include}")
    assert not beside(tmp_path)


def test_a_newer_compilers_library() -> None:
    text = "/x/_C.so: /usr/lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by /x/_C.so)"
    found = list(cpp.of_ldd(Path("/x/_C.so"), text, "module load gcc", "2.13.0"))
    assert "needs GLIBCXX_3.4.32" in words(found)
    assert "module load gcc" in words(found)


def test_a_build_for_gpus() -> None:
    text = "\tlibtorch_cuda.so => not found\n\tlibc10.so => /x/libc10.so\n"
    found = words(cpp.of_ldd(Path("/x/_C.so"), text, "module load gcc", "2.13.0+cpu"))
    assert "it is built for CUDA, and this torch is 2.13.0+cpu | build it again with this torch" in found


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installs a package that requires torch; returns the extension in it, beside which is a variant for GPUs."""
    needs.compiler()
    extension = tmp_path / "packages" / f"mine{sysconfig.get_config_var('EXT_SUFFIX')}"
    facts = tmp_path / "packages" / "mine-1.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\nRequires-Dist: torch>=2\n")
    (facts / "RECORD").write_text(f"{extension.name},,\nlibmine_cuda117.so,,\n")
    source = "namespace c10 { void not_here(int); }\nvoid use() { c10::not_here(1); }"
    compiled = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(extension)]
    subprocess.run(compiled, input=source, text=True, check=True, capture_output=True)
    (tmp_path / "packages" / "libmine_cuda117.so").write_bytes(extension.read_bytes())
    monkeypatch.syspath_prepend(tmp_path / "packages")
    return extension


def test_installed_packages_are_looked_at(package: Path, tmp_path: Path) -> None:
    found = [file for file in cpp.installed_extensions() if file.is_relative_to(tmp_path)]
    assert found == [package]
    said = [one for one in examine(cpp.check_extensions) if str(tmp_path) in one.what]
    assert [one.level for one in said] == ["note"] and "which no library has" in said[0].what
    assert not examine(cpp.check_extensions, job=True)


def test_what_there_is_no_time_for_is_said(package: Path) -> None:
    said = words(cpp.of_extensions([package, package], (), APT, seconds=-1.0))
    assert said.startswith(f"note: {package} and 1 more is not looked at")


def test_an_ldd_that_runs_files_is_not_asked(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [cpp.ldd_runs_files("glibc", one) for one in ("2.17", "2.27", "2.36", "")] == [True] + [False] * 3
    assert not cpp.ldd_runs_files("", "")
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.17"))
    monkeypatch.setattr(cpp, "ldd_output", lambda *_: pytest.fail("it was asked"))
    assert "are not looked at" in words(examine(cpp.check_extensions))
