"""A folder of transformers in, a run, and a folder of transformers out, which gives the run's predictions."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

import grappe
from grappe.contrib.export.export import export
from grappe.contrib.export.folder import ExportOptions
from grappe.errors import TaskError
from tests import needs
from tests.contrib.export.tasks import Plain

pytest.importorskip("transformers")

import transformers

from tests.parallel.families import Llama, Words

needs.library("peft")

PLAN = "threads=1,device=cpu"
OPTIONS = grappe.Options(steps=2)


class FineTuned(Words):
    """A Llama whose weights come from a folder, and its classes' numbers as predictions."""

    place: str = ""
    adapters: bool = False

    def model(self) -> Any:
        one = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(self.place))
        grappe.pretrained(one, self.place)
        if self.adapters:
            import peft

            return peft.get_peft_model(one, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        return one

    def prediction(self, output: Any) -> Any:
        return output.logits


@pytest.fixture
def given(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    Llama().model().save_pretrained(tmp_path / "given", max_shard_size="20KB")
    assert (tmp_path / "given" / "model.safetensors.index.json").exists()
    return tmp_path / "given"


@pytest.mark.parametrize("adapters", [False, True])
def test_from_pretrained_reads_what_a_run_learned(given: Path, tmp_path: Path, adapters: bool) -> None:
    run, out, task = tmp_path / "run", tmp_path / "out", FineTuned(place=str(given), adapters=adapters)
    grappe.train(task, PLAN, run, options=OPTIONS)
    given.rename(tmp_path / "moved")  # what was trained does not need it; the configuration does
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "config.json").write_bytes((tmp_path / "moved" / "config.json").read_bytes())
    done = export(run, out, ExportOptions(format="transformers"), task=task)
    assert done.proof.samples == 29
    again = transformers.LlamaForCausalLM.from_pretrained(out).eval()
    data = task.data("validation", tmp_path)
    with torch.no_grad():
        logits = again(**data.inputs).logits
    rows = torch.stack(list(grappe.predict(run, "validation", task=task)))
    assert torch.allclose(logits, rows, atol=1e-4)
    moved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "moved")
    assert not torch.equal(again.model.layers[0].self_attn.q_proj.weight, moved.model.layers[0].self_attn.q_proj.weight)
    for line in (out / "SHA256SUMS").read_text().splitlines():
        digest, _, name = line.partition("  ")
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest


def test_another_model_is_refused(tmp_path: Path) -> None:
    grappe.train(Plain(), PLAN, tmp_path / "run", options=OPTIONS)
    with pytest.raises(TaskError, match=r"there is none in it\. Take --format safetensors"):
        export(tmp_path / "run", tmp_path / "out", ExportOptions(format="transformers"), task=Plain())
    assert not (tmp_path / "out").exists()
