"""Tests of the plans and settings that the DeepSpeed engine refuses or passes on."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from grappe import engines
from grappe.contrib.deepspeed import library, settings, state
from grappe.errors import PlanError
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World
from grappe.plan import Plan
from tests.parity.tasks import Images

TASK = Images(clip=0.5)  # 12 samples a step
ALONE = World(process=ProcessRank(job="x"), device=torch.device("cpu"))


def plan(text: str, file: Path | None = None, **said: object) -> Plan:
    parts = ["engine=deepspeed", text]
    if file is not None:
        (file / "ds_config.json").write_text(json.dumps(said))
        parts.append(f"config={file / 'ds_config.json'}")
    return Plan.parse(",".join(part for part in parts if part))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("replicate=2,shard=2", "use shard=4 (ZeRO), replicate=4, or engine=native"),
        ("replicate=2,offload=cpu", "use shard=2 with offload=cpu"),
        ("shard=2,zero=2,offload=nvme:/tmp", "leave zero=2 out, or use offload=cpu"),
        ("shard=2,offload=nvme:/no/such/folder", "there is no such folder: make it"),
        ("pipeline=2", "engine=deepspeed has no pipeline"),
        ("tensor=2", "has no tensor: engines that have: "),
        ("compile", "has no compile: engines that have: "),
    ],
)
def test_what_it_cannot_do_is_refused_with_what_to_do(text: str, words: str) -> None:
    pytest.importorskip("deepspeed")
    with pytest.raises(PlanError) as caught:
        engines.check(plan(text))
    assert words in str(caught.value)


def test_what_is_not_installed_is_said_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match=r"pip install 'grappe\[deepspeed\]'"):
        engines.check(plan("shard=2"))
    monkeypatch.setattr(library, "built_everywhere", lambda builder, world: False)
    with pytest.raises(PlanError, match="apt-get install libaio-dev"):
        library.check_libaio(None)  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_written_directly_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.problem(tmp_path) is None
    assert not list(tmp_path.iterdir())

    def refusing(*_: object) -> int:
        raise OSError(22, os.strerror(22))

    monkeypatch.setattr(library.os, "open", refusing)
    assert "Invalid argument" in str(library.problem(tmp_path))


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "check_libaio", lambda world: None)
    usage = shutil.disk_usage(tmp_path)._replace(free=10**6)
    monkeypatch.setattr(library.shutil, "disk_usage", lambda folder: usage)
    scratch = library.Scratch(plan(f"offload=nvme:{tmp_path}"), ALONE)
    with pytest.raises(PlanError, match=r"needs about 1\.9 GiB on each node, and has 0\.0 GiB"):
        scratch.make(10**8, {})
    assert not list(tmp_path.iterdir())


def test_what_a_killed_training_left_on_the_disk_goes_with_the_next(tmp_path, monkeypatch):
    gone, lives, mine_own = (tmp_path / f"{library.PREFIX}{one}" for one in ("gone", "lives", "notes-1"))
    for folder in (gone, lives, mine_own):
        folder.mkdir()
    library._owned(gone).close()  # as the end of its process does
    (gone / "rank-0").write_bytes(bytes(9))
    owner = library._owned(lives)
    (mine_own / "thesis.txt").write_text("mine")
    monkeypatch.setattr(library, "check_libaio", lambda world: None)
    scratch = library.Scratch(plan(f"offload=nvme:{tmp_path}"), ALONE)
    said: dict = {"zero_optimization": {"offload_optimizer": {}, "offload_param": {}}}
    scratch.make(1000, said)
    assert not gone.exists()
    assert (lives / "owner").exists()
    assert (mine_own / "thesis.txt").read_text() == "mine"
    mine = Path(said["zero_optimization"]["offload_param"]["nvme_path"])
    assert mine.is_dir()
    scratch.close()
    assert sorted(tmp_path.iterdir()) == sorted([lives, mine_own])
    owner.close()


def test_settings_that_leave_open_what_is_learned_go_to_deepspeed(tmp_path: Path) -> None:
    said = {
        "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1000, "offload_param": {"device": "none"}},
        "train_batch_size": 12,
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": True},
        "gradient_clipping": 0.5,
        "wall_clock_breakdown": True,
    }
    merged = settings.settings(plan("shard=2,precision=bf16", tmp_path, **said), TASK, 1000, 100, cuda=False)
    assert merged["zero_optimization"]["stage3_max_live_parameters"] == 1000
    assert merged["zero_optimization"]["stage"] == 3
    assert merged["wall_clock_breakdown"] is True
    assert merged["gradient_clipping"] == 0.5
    assert "bf16" not in merged, "it would make the parameters bf16"


TWO = "microbatches=2"


def in_zero(**said: object) -> dict:
    return {"zero_optimization": said}


@pytest.mark.parametrize(
    ("text", "said", "words"),
    [
        ("shard=2,zero=2", {"zero_optimization": {"stage": 3}}, "zero_optimization.stage is 3, but zero=2"),
        ("replicate=2", {"zero_optimization": {"stage": 1}}, "zero_optimization.stage is 1, but replicate=2"),
        ("shard=2", {"fp16": {"enabled": True}}, "fp16.enabled is true, but precision=fp32"),
        ("shard=2", {"train_batch_size": 64}, "train_batch_size is 64, but the task's batch_size=12"),
        ("shard=2", {"gradient_clipping": 1.0}, "gradient_clipping is 1.0, but the task's clip=0.5"),
        (f"shard=2,{TWO}", {"gradient_accumulation_steps": 4}, f"gradient_accumulation_steps is 4, but {TWO}"),
        (
            "shard=2",
            in_zero(offload_optimizer={"device": "cpu"}),
            '_optimizer.device is "cpu", but offload=none',
        ),
        ("shard=2", {"optimizer": {"type": "Adam"}}, "optimizer: the task's optimizer() sets it"),
        ("shard=2", {"communication_data_type": "fp16"}, "reductions are in fp32"),
        ("shard=2", {"wall_clock_brakedown": True}, "did you mean wall_clock_breakdown"),
        ("shard=2", in_zero(zero_quantized_gradients=True), "zero_quantized_gradients is not a setting that keeps the"),
    ],
)
def test_a_contradiction_is_named(tmp_path: Path, text: str, said: dict, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        settings.settings(plan(text, tmp_path, **said), TASK, 1000, 100, cuda=False)
    assert words in str(caught.value)


def test_all_contradictions_are_named_at_once_and_before_the_task_is_known(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    said = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "train_batch_size": 99}
    with pytest.raises(PlanError) as caught:
        engines.check(plan("shard=2", tmp_path, **said))
    assert "zero_optimization.stage is 1" in str(caught.value)
    assert "bf16.enabled is true" in str(caught.value)
    assert "train_batch_size" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"), [("{", "is not JSON"), ("[1]", "holds no JSON object"), (None, "cannot be read")]
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "mine.json").write_text(text)
    with pytest.raises(PlanError, match=words):
        settings.read(plan(f"config={tmp_path / 'mine.json'}"))


class Whole(torch.optim.SGD):
    """Could look at whole matrices, for all that is known."""


def test_an_optimizer_that_may_need_whole_matrices_is_refused_where_they_are_flattened() -> None:
    mine = Whole([nn.Parameter(torch.ones(2))], lr=0.1)
    state.check_elementwise(mine, 0)
    with pytest.raises(PlanError, match=r"gives the optimizer flat pieces.*use replicate=N, or engine=native"):
        state.check_elementwise(mine, 1)


@pytest.mark.parametrize(
    ("options", "plain"),
    [({}, True), ({"amsgrad": True}, False), ({"maximize": True}, False), ({"lr": torch.tensor(0.1)}, False)],
)
def test_deepspeeds_adam_stands_in_for_a_plain_one_only(options: dict, plain: bool) -> None:
    adam = torch.optim.AdamW([nn.Parameter(torch.ones(2))], **options)
    assert state._plain_adam(adam) is plain


def test_a_compilation_that_was_killed_holds_nobody_up(tmp_path: Path) -> None:
    for name, age in (("killed", 10_000.0), ("going_on", 0.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
        then = time.time() - age
        os.utime(tmp_path / name / "lock", (then, then))
    library.forget_killed_builds(tmp_path)
    assert [file.parent.name for file in tmp_path.glob("*/lock")] == ["going_on"]
