"""Weights of a local folder: one file or several, with other names, in little memory, and in one process alone."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import grappe
from grappe.checkpoint.initial import built
from grappe.errors import OutOfMemory, TaskError, UsageError
from grappe.launch.fork import LimitReached, Limits, run_in_fork
from grappe.parallel.materialise import on_meta
from tests.parity.tasks import Tokens

WIDTH, LAYERS = 1024, 24
MEGABYTE = 1 << 20
SIZE = LAYERS * WIDTH * WIDTH * 4


def network(width: int = 4, layers: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def sharded(folder: Path, model: nn.Module) -> Path:
    """A file for each tensor, and the index, as transformers writes them."""
    folder.mkdir(exist_ok=True)
    index = {}
    for number, (name, tensor) in enumerate(model.state_dict().items()):
        index[name] = f"model-{number:05d}.safetensors"
        save_file({name: tensor}, folder / index[name], metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


class Large(Tokens):
    """100 MB of weights, from a folder."""

    place: str = ""

    def model(self) -> nn.Module:
        return grappe.pretrained(network(WIDTH, LAYERS), self.place)


@pytest.fixture
def large(tmp_path: Path) -> Large:
    with torch.device("meta"):
        sketch = network(WIDTH, LAYERS)
    sharded(tmp_path / "large", sketch.to_empty(device="cpu").requires_grad_(False))
    return Large(place=str(tmp_path / "large"))


def test_one_process_reads_with_memory_for_the_model_and_a_tensor(large: Large) -> None:
    enough = Limits(memory=SIZE + 32 * MEGABYTE, mapped=SIZE + 64 * MEGABYTE, seconds=60)
    run_in_fork(lambda: built(large), enough)
    with pytest.raises((LimitReached, OutOfMemory)):  # the limit does bite
        run_in_fork(lambda: built(large), Limits(memory=MEGABYTE, mapped=MEGABYTE, seconds=60))


def test_all_others_read_nothing(large: Large) -> None:
    def sketched() -> None:
        assert sum(one.numel() for one in on_meta(large).parameters()) * 4 == SIZE

    run_in_fork(sketched, Limits(memory=16 * MEGABYTE, mapped=64 * MEGABYTE, seconds=60))


def test_a_file_a_folder_and_an_index(tmp_path: Path) -> None:
    given = network()
    (tmp_path / "one").mkdir()
    save_file(given.state_dict(), tmp_path / "one" / "model.safetensors")
    places = [tmp_path / "one", tmp_path / "one" / "model.safetensors", sharded(tmp_path / "several", given)]
    (tmp_path / "link").symlink_to(tmp_path / "several")
    for place in [*places, tmp_path / "link"]:
        made = grappe.pretrained(network(), place)
        assert all(torch.equal(one, made.state_dict()[name]) for name, one in given.state_dict().items())


def test_names_that_differ_are_said_and_may_be_meant(tmp_path: Path) -> None:
    place = sharded(tmp_path / "two", network())
    with pytest.raises(TaskError, match=r"Missing: 2\.weight\. Left over: none.*fresh=.*as 2\.\*"):
        grappe.pretrained(network(layers=3), place)
    with pytest.raises(TaskError, match=r"Missing: none\. Left over: 1\.weight"):
        grappe.pretrained(network(layers=1), place)
    with pytest.raises(UsageError, match=r"0\.weight is \[4, 4\] there and \[5, 5\] in the model"):
        grappe.pretrained(network(5), place)
    made = network(layers=3)
    kept = made[2].weight.clone()
    grappe.pretrained(made, place, fresh=["2.*"])
    assert torch.equal(made[2].weight, kept)
    grappe.pretrained(network(layers=1), place, unused=["1.*"])


class Counted(Tokens):
    """A model that computes with NumPy while it is made."""

    def model(self) -> nn.Module:
        return nn.Linear(4, len(torch.linspace(0, 1, 3).numpy()))


def test_a_model_that_is_made_with_numpy_is_made_with_memory() -> None:
    assert not on_meta(Counted()).weight.is_meta


def test_what_is_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"there is neither.*save_pretrained"):
        grappe.pretrained(network(), tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(TaskError, match="name that file, to read its weights alone"):
        grappe.pretrained(network(), tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "../a.safetensors"}}')
    with pytest.raises(TaskError, match="which is not in the folder"):
        grappe.pretrained(network(), tmp_path)
    index.write_text("[1]")
    with pytest.raises(TaskError, match="not an index"):
        grappe.pretrained(network(), tmp_path)


def test_tied_weights_and_models_of_transformers_with_and_without_a_head(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    whole = transformers.BertForMaskedLM(config)
    whole.save_pretrained(tmp_path / "head")
    made = grappe.pretrained(transformers.BertForMaskedLM(config), tmp_path / "head")
    assert all(torch.equal(one, made.state_dict()[name]) for name, one in whole.state_dict().items())
    bare = transformers.BertModel(config, add_pooling_layer=False)
    grappe.pretrained(bare, tmp_path / "head", unused=["cls.*"])
    assert torch.equal(bare.embeddings.word_embeddings.weight, whole.bert.embeddings.word_embeddings.weight)
    bare.save_pretrained(tmp_path / "bare")
    again = grappe.pretrained(transformers.BertForMaskedLM(config), tmp_path / "bare", fresh=["cls.*"])
    assert torch.equal(again.bert.embeddings.word_embeddings.weight, bare.embeddings.word_embeddings.weight)


def test_a_new_head_keeps_its_initial_values(tmp_path: Path) -> None:
    other = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    torch.save(other.state_dict(), tmp_path / "other.pth")
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    head = model[1].weight.detach().clone()
    with pytest.raises(UsageError, match=r'1.weight is \[4, 8\] there and \[3, 8\] .*fresh=\["NAME.\*"\]'):
        grappe.pretrained(model, tmp_path / "other.pth")
    grappe.pretrained(model, tmp_path / "other.pth", fresh=["1.*"])
    assert torch.equal(model[0].weight, other[0].weight)
    assert torch.equal(model[1].weight, head)
