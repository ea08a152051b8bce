"""Starting is resuming from step 0: a builder makes the weights in a process of its own."""

import os
import signal
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from grappe import Arrays, Task
from grappe.checkpoint.foreign_training import Begin
from grappe.checkpoint.format import latest
from grappe.checkpoint.initial import build, built
from grappe.errors import OutOfMemory, RunError, TaskError

MADE_BY: list[int] = []
LINE = r" \(.*test_initial.py, line \d+, in model\(\): raise"
WHATEVER = Literal["well", "raise", "kill", "leave", "exit", "nothing", "need", "sparse"]


class Small(Task):
    """A linear layer and a normalisation; it can go wrong in every way."""

    goes: WHATEVER = "well"
    width: int = 3

    def model(self) -> nn.Module:
        MADE_BY.append(os.getpid())
        if self.goes == "raise":
            raise ValueError(f"width {self.width} is odd")
        if self.goes == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.goes == "leave":
            os._exit(0)
        if self.goes == "need" and torch.get_default_device().type != "meta":
            raise MemoryError
        if self.goes == "exit":
            sys.exit("no more")
        if self.goes == "nothing":
            return None  # type: ignore[return-value]
        model = nn.Sequential(nn.Linear(self.width, 4), nn.BatchNorm1d(4))
        if self.goes == "sparse":
            model[0].register_buffer("graph", torch.eye(3).to_sparse())
        model.register_buffer("hidden", torch.randn(2), persistent=False)
        return model

    def data(self, split: str, folder: Path) -> Arrays:
        return Arrays(torch.zeros(2, self.width), torch.zeros(2))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.sum(1)


def started(folder: Path, given: Path | None = None, task: Task | None = None) -> dict[str, torch.Tensor]:
    """The weights of a new run's step 0."""
    build(task or Small(), folder / "checkpoints", None if given is None else Begin(source=given))
    checkpoint = latest(folder / "checkpoints")
    assert (checkpoint.step, checkpoint.read_values()) == (0, {"step": 0})
    model = checkpoint.read_model()
    return {name: model.read(name) for name in model}


def alike(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_the_model_is_made_in_a_child(tmp_path) -> None:
    MADE_BY.clear()
    weights = started(tmp_path)
    assert MADE_BY == []  # nothing of the child's memory is ours
    world = built(Small())
    assert set(MADE_BY) == {os.getpid()}
    assert alike(weights, {name: world.read(name) for name in world})
    assert "hidden" in weights
    assert alike(weights, started(tmp_path / "again"))
    assert not alike(weights, started(tmp_path / "seed", task=Small(seed=8)))


@pytest.mark.parametrize(
    ("goes", "words"),
    [
        ("raise", r"Small.model\(\) failed: ValueError: width 3 is odd" + LINE),
        ("kill", r"was killed, or ended itself: is the model larger than this machine's memory\?"),
        ("leave", r"was killed, or ended itself"),
        ("exit", r"Small.model\(\) failed: SystemExit: no more"),
        ("nothing", r"Small.model\(\) returned NoneType: return an nn.Module"),
        ("sparse", r"Small.model\(\) has sparse tensors \(0.graph\).*indices and values as buffers"),
    ],
)
def test_what_goes_wrong_in_the_child_is_one_message(tmp_path, goes: WHATEVER, words: str) -> None:
    with pytest.raises(TaskError, match=words) as raised:
        build(Small(goes=goes), tmp_path / "checkpoints", None)
    assert "\n" not in str(raised.value)
    assert latest(tmp_path / "checkpoints") is None


def state_of(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: tensor.clone() for name, tensor in Small().model().state_dict().items()}


def test_from_a_run(tmp_path) -> None:
    first = started(tmp_path / "first", task=Small(seed=8))
    assert alike(started(tmp_path / "second", given=tmp_path / "first"), first)


def test_from_a_file_with_more_than_weights_and_no_ending(tmp_path) -> None:
    given, file = state_of(8), tmp_path / "checkpoint_path"
    net = {f"module.{name}": tensor for name, tensor in given.items()}
    optimizer = torch.optim.SGD(Small().model().parameters(), lr=0.1).state_dict()
    torch.save({"net": net, "optimizer": optimizer, "epoch": 3}, file)
    weights = started(tmp_path / "run", given=file)
    fresh = started(tmp_path / "fresh")
    assert alike(weights, {**given, "hidden": fresh["hidden"]})  # what is not saved is made afresh


def test_a_run_that_goes_on_has_its_schedule_and_its_data_behind_the_epochs_that_are_done(tmp_path) -> None:
    torch.save(state_of(8), tmp_path / "a.pt")
    begin = Begin(source=tmp_path / "a.pt", epochs_done=3, epochs=4, steps_per_epoch=5)
    build(Small(), tmp_path / "checkpoints", begin)
    checkpoint = latest(tmp_path / "checkpoints")
    assert checkpoint is not None and checkpoint.step == 15
    state = checkpoint.read_values()
    assert (state["step"], state["engine"]["schedule_steps"]) == (15, 15)


def test_names_that_do_not_match_are_listed(tmp_path) -> None:
    given = state_of(8)
    del given["0.bias"]
    torch.save({**given, **{f"extra{index}": torch.ones(1) for index in range(7)}}, tmp_path / "a.pt")
    words = r"Missing: 0.bias. Left over: extra0, extra1, extra2, extra3, extra4 and 2 more"
    with pytest.raises(RunError, match=words):
        build(Small(), tmp_path / "checkpoints", Begin(source=tmp_path / "a.pt"))
    assert latest(tmp_path / "checkpoints") is None


def test_from_what_is_no_run(tmp_path) -> None:
    with pytest.raises(TaskError, match=r"is no run: it has to be a \.safetensors file, or a folder with"):
        build(Small(), tmp_path / "checkpoints", Begin(source=tmp_path))
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(RunError, match="no run with a checkpoint that verifies"):
        build(Small(), tmp_path / "checkpoints", Begin(source=tmp_path))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (".metadata", "a distributed checkpoint of torch's: python -m .*dcp_to_torch"),
        ("latest", "DeepSpeed's checkpoint: python .*zero_to_fp32.py"),
        ("adapter_config.json", "an adapter of peft's: .*merge_and_unload"),
        ("pytorch_model.bin.index.json", r"several \.bin files of transformers': AutoModel"),
        ("hparams.yaml", "a folder of Lightning's: --from a file in .*checkpoints"),
    ],
)
def test_other_tools_folders_are_named_with_the_way(tmp_path: Path, name: str, words: str) -> None:
    source = tmp_path / "given"
    (source / "checkpoints").mkdir(parents=True)
    (source / name).write_text("x")
    with pytest.raises(RunError, match=f"this is {words}"):
        build(Small(), tmp_path / "checkpoints", Begin(source=source))
    (source / "weights.pt").write_bytes(b"x")
    with pytest.raises(RunError) as caught:
        build(Small(), tmp_path / "checkpoints", Begin(source=source / "weights.pt"))
    assert ("this is" in str(caught.value)) is (name == "adapter_config.json")


def test_an_older_checkpoint_of_a_run_is_said(tmp_path) -> None:
    task, run = Small(), tmp_path / "run/checkpoints"
    build(task, run, None)
    newest = run / "step-000007"
    newest.mkdir()
    (newest / "manifest.json").write_text("{}")
    notes = build(task, tmp_path / "new/checkpoints", Begin(source=tmp_path / "run"))
    assert len(notes) == 1
    assert "step-000007 does not verify" in notes[0]
    assert "step-000000 is taken" in notes[0]
    assert build(task, tmp_path / "third/checkpoints", None) == ()


def test_too_little_memory_for_the_whole_model_is_said_with_its_size(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match=r"under any plan, with 4 MB of parameters\. Small\.model\(\) ran out"):
        build(Small(goes="need", width=250_000), tmp_path / "checkpoints", None)
