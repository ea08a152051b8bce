"""An exported program gives the run's predictions, in Python and built by cmake from its folder alone."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from grappe.cli.commands import app
from grappe.contrib.export.export import export
from grappe.contrib.export.folder import ExportOptions
from grappe.contrib.export.proof import TOLERANCE
from grappe.tasks.digits import Digits
from grappe.training.run import Run
from grappe.verbs.predict.predict import predict
from tests import needs
from tests.contrib.export.tasks import Tied
from tests.patience import PATIENCE_SECONDS
from tests.training.test_training import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A training in bf16, which is predicted and exported in float32."""
    needs.compiler()
    folder = tmp_path_factory.mktemp("program") / "run"
    return Run(train(folder, Digits(epochs=1), "threads=1,precision=bf16").run)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def exported(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder, away from where it was written."""
    folder = tmp_path_factory.mktemp("away")
    app(["export", str(run.folder), "--out", str(folder / "out")], exit_on_error=False, print_error=False)
    return (folder / "out").rename(folder / "digits")


@pytest.fixture(scope="module")
def program(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the folder, as its README says: LibTorch is in the wheel of the environment's `python3`."""
    needs.program("cmake")
    copy = tmp_path_factory.mktemp("build") / "digits"
    shutil.copytree(exported, copy)
    line = re.search(r"^(cmake .*) && (cmake .*)$", (copy / "README.md").read_text(), re.MULTILINE)
    assert line
    active = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for words in line.groups():
        done = subprocess.run(
            words.split(), cwd=copy, check=False, capture_output=True, text=True, env=active, timeout=PATIENCE_SECONDS
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return copy / "build/predict"


def ran(program: Path, *words: object, **variables: str) -> tuple[int, list[dict[str, float]], str]:
    """The exit code, the lines and the errors of the program."""
    done = subprocess.run(
        [str(program), *map(str, words)],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env={"OMP_NUM_THREADS": "1", **variables},
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_the_manifest_says_what_was_proven(exported: Path, run: Run) -> None:
    known = json.loads((exported / "manifest.json").read_text())
    assert known["proof"]["samples"] == 180
    assert known["proof"]["batch_sizes"] == [1, 2, 64]  # 180 is not a multiple of 64: the last is short
    assert known["proof"]["largest_difference"] <= TOLERANCE
    assert known["proof"]["cpp"] is True
    assert known["torch"] == torch.__version__
    assert known["device"] == "cpu"
    assert known["instruction_set"]
    assert known["trained_with"] == "precision=bf16,threads=1"
    assert known["inputs"] == [{"name": "inputs", "dtype": "u1", "shape": [1, 8, 8]}]
    assert [one["name"] for one in known["outputs"]] == ["class", "probability"]
    assert known["checkpoint"] == f"step-{run.choose().checkpoint.step:06d}"  # type: ignore[union-attr]
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=exported, check=True)


def test_the_program_prints_what_predict_gives(program: Path, run: Run, tmp_path: Path) -> None:
    images = Digits().data("validation", tmp_path).inputs.numpy()
    np.save(tmp_path / "images.npy", images)
    wanted = list(predict(run, "validation", task=Digits))
    for batch in (1, 2, 64, 180, 1000):
        code, lines, errors = ran(program, program.parents[1] / "model.pt2", tmp_path / "images.npy", "--batch", batch)
        assert code == 0, errors
        assert [one["class"] for one in lines] == [int(one["class"]) for one in wanted]
        gaps = [abs(a["probability"] - float(b["probability"])) for a, b in zip(lines, wanted, strict=True)]
        assert max(gaps) <= TOLERANCE


def test_the_test_vectors_are_right(program: Path) -> None:
    folder = program.parents[1]
    code, lines, _ = ran(program, folder / "model.pt2", folder / "test/inputs.npy")
    wanted = [json.loads(line) for line in (folder / "test/expected.jsonl").read_text().splitlines()]
    assert code == 0
    assert len(lines) == 8
    assert [one["class"] for one in lines] == [one["class"] for one in wanted]
    assert [one["probability"] for one in lines] == pytest.approx([one["probability"] for one in wanted], abs=1e-5)


@pytest.mark.soak  # test_shipped.py compiles a program with weights in int8
def test_int8_weights_make_a_smaller_program_that_scores_as_well(exported: Path, run: Run, tmp_path: Path) -> None:
    done = export(run, tmp_path / "out", ExportOptions(weights="int8", no_build=True))
    sizes = [(folder / "model.pt2").stat().st_size for folder in (exported, done.folder)]
    matrices = sum(one.numel() for one in Digits().model().parameters() if one.dim() > 1)
    assert sizes[0] - sizes[1] > 2 * matrices  # of four bytes each one is left
    assert done.proof.largest_difference <= TOLERANCE
    assert abs(done.scores["int8"]["accuracy"] - done.scores["fp32"]["accuracy"]) <= 0.01


GOOD = np.zeros((3, 1, 8, 8), np.uint8)


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (GOOD[:0], "there is no sample in it"),
        (GOOD.astype(np.float32), "its numbers are <f4, and the model takes u1"),
        (GOOD.astype(np.int8), "its numbers are |i1"),
        (GOOD[:, :, :7], "its shape is (3, 1, 7, 8), and the model takes [N, 1, 8, 8]"),
        (GOOD[0], "its shape is (1, 8, 8)"),
        (np.uint8(3), "its shape is ()"),
        (np.asfortranarray(GOOD), "it is in Fortran's order"),
    ],
)  # fmt: skip
def test_wrong_inputs_are_refused(array: np.ndarray, told: str, program: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", array)
    code, lines, errors = ran(program, program.parents[1] / "model.pt2", tmp_path / "x.npy")
    assert (code, lines) == (2, [])
    assert told in errors
    assert errors.count("\n") == 1


def test_samples_that_do_not_lie_together_are_the_same_once_saved(program: Path, tmp_path: Path) -> None:
    """The package itself takes strides for granted and predicts nonsense; a .npy file has none."""
    images = Digits().data("validation", tmp_path).inputs[:4].numpy()
    np.save(tmp_path / "a.npy", images)
    np.save(tmp_path / "b.npy", np.repeat(images, 2, axis=3)[..., ::2])
    package = program.parents[1] / "model.pt2"
    assert ran(program, package, tmp_path / "a.npy") == ran(program, package, tmp_path / "b.npy")


@pytest.mark.parametrize("cut", [0, 5, 11, 60, -1])
def test_a_cut_file_of_samples_is_refused(cut: int, program: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", GOOD)
    whole = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(whole[:cut])
    code, lines, errors = ran(program, program.parents[1] / "model.pt2", tmp_path / "x.npy")
    assert (code, lines) == (2, [])
    assert "x.npy: it is" in errors


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["x.npy", "x.npy"],
        ["x.npy", "--batch", "0"],
        ["x.npy", "--batch"],
        ["x.npy", "--batch", "x"],
        ["x.npy", "--size", "1"],
        ["x.npy", "--batch", "1", "--batch", "1"],
        ["none.npy"],
    ],
)
def test_wrong_use_is_told(words: list[str], program: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", GOOD)
    files = [tmp_path / word if word.endswith(".npy") else word for word in words]
    code, lines, errors = ran(program, program.parents[1] / "model.pt2", *files[:1], *files[1:])
    assert (code, lines) == (2, [])
    assert "predict: " in errors


def test_a_damaged_package_predicts_nothing(program: Path, tmp_path: Path) -> None:
    """torch's loader looks at no checksum of the archive: it would run what is there."""
    folder = program.parents[1]
    whole = (folder / "model.pt2").read_bytes()
    middle = whole.index(b"\x7fELF") + len(whole) // 3  # inside of the compiled code
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    for name, content in {"cut": whole[:-1], "flipped": flipped, "empty": b""}.items():
        (tmp_path / f"{name}.pt2").write_bytes(content)
        code, lines, errors = ran(program, tmp_path / f"{name}.pt2", folder / "test/inputs.npy")
        assert (code, lines) == (2, []), name
        assert f"{name}.pt2: it is damaged, or is not the package" in errors


def test_a_processor_without_the_instructions_is_told(program: Path, exported: Path) -> None:
    if json.loads((exported / "manifest.json").read_text())["instruction_set"] != "AVX2":
        assert "AVX2" not in (exported / "model.h").read_text()
        return
    folder = program.parents[1]
    words = folder / "model.pt2", folder / "test/inputs.npy"
    code, lines, errors = ran(program, *words, ATEN_CPU_CAPABILITY="default")
    assert (code, lines) == (2, [])
    assert "needs a processor with AVX2, and this one has" in errors


def test_another_libtorch_is_refused_by_the_compiler(program: Path, tmp_path: Path) -> None:
    folder = program.parents[1]
    text = (folder / "model.h").read_text()
    (tmp_path / "model.h").write_text(text.replace("kTorchMajor = 2", "kTorchMajor = 1"))
    # Without the headers of the rest, which take a compiler most of its time.
    kept = r'#include (?:<torch/version.h>|"model.h")|static_assert\([^;]*;'
    lines = re.findall(kept, (folder / "main.cpp").read_text())
    assert len(lines) == 3
    (tmp_path / "main.cpp").write_text("\n".join(lines))
    include = Path(torch.__file__).parent / "include"
    flags = ["-std=c++17", "-fsyntax-only", f"-I{include}", f"-I{include}/torch/csrc/api/include"]
    done = subprocess.run(
        ["g++", *flags, "main.cpp"], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode
    assert "model.pt2 was compiled for another LibTorch" in done.stderr


def test_tied_weights_buffers_and_nested_predictions_are_exported(tmp_path: Path) -> None:
    """Proven in Python only: the program is built by the other tests."""
    needs.compiler()
    made = Run(train(tmp_path / "run", Tied(), steps=2).run)
    done = export(made, tmp_path / "out", ExportOptions(no_build=True), task=Tied, data=tmp_path)
    assert done.cpp == "--no-build was given"
    assert done.proof.batch_sizes == (1, 2, 12)
    known = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [one["name"] for one in known["outputs"]] == ["class", "chances", "sure"]
    assert known["proof"]["cpp"] == "--no-build was given"
