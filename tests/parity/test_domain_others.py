"""Models of others, unedited, under domain=2: what one process learns, or a refusal with the operator and the line."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grappe import Arrays, Task
from grappe.verbs.verify.verify import verify
from tests import needs
from tests.parity import reference
from tests.parity.planted import runner
from tests.processes import Pool

needs.library("transformers")

STEPS = 2


class Others(Task):
    """Images [3, 64, 64] with a class for each pixel."""

    batch_size: int = 2
    shape: tuple[int, ...] = (3, 64, 64)

    def optimizer(self, named_parameters: Any) -> Any:
        return torch.optim.SGD(named_parameters, lr=0.01)

    def loss(self, output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output["out"], target, reduction="none")

    def data(self, split: str, folder: Path) -> Arrays:
        generator = torch.Generator().manual_seed(5)
        images = torch.randn(4, *self.shape, generator=generator)
        return Arrays(images, torch.randint(0, 4, (4, *self.shape[1:]), generator=generator))


class Segmenter(Others):
    """transformers' MobileNetV2 with DeepLabV3+: padding as TensorFlow's, dilation, a pooled branch."""

    def model(self) -> nn.Module:
        from transformers import MobileNetV2Config, MobileNetV2ForSemanticSegmentation

        return MobileNetV2ForSemanticSegmentation(
            MobileNetV2Config(num_labels=4, image_size=64, depth_multiplier=0.25, classifier_dropout_prob=0.0)
        )

    def loss(self, output: Any, target: Tensor) -> Tensor:
        logits = F.interpolate(output.logits, size=target.shape[1:], mode="bilinear")
        return F.cross_entropy(logits, target, reduction="none").mean((1, 2))


class Video(Others):
    """transformers' ViViT on clips [8, 3, 32, 32], of which the time is cut."""

    shape: tuple[int, ...] = (8, 3, 32, 32)

    def model(self) -> nn.Module:
        from transformers import VivitConfig, VivitForVideoClassification

        config = VivitConfig(
            image_size=32, num_frames=8, tubelet_size=[2, 8, 8], hidden_size=32, num_hidden_layers=2, num_labels=4,
            num_attention_heads=2, intermediate_size=64,
        )  # fmt: skip
        return VivitForVideoClassification(config)

    def domain(self, inputs: Any, targets: Any) -> Any:
        return 1, None

    def data(self, split: str, folder: Path) -> Arrays:
        whole = super().data(split, folder)
        return Arrays(whole.inputs, whole.targets[:, 0, 0, 0])

    def loss(self, output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output.logits, target, reduction="none")


class Tokens(Others):
    """Texts of 47 tokens, an odd number, whose next ones are asked for."""

    def loss(self, output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.transpose(1, 2), target, reduction="none").mean(1)

    def data(self, split: str, folder: Path) -> Arrays:
        ids = torch.randint(1, 50, (4, 47), generator=torch.Generator().manual_seed(5))
        return Arrays(ids, ids.roll(-1, 1))


class GPT2(Tokens):
    """transformers' GPT-2, whose linear layers are addmm of merged samples and positions, with its dropout."""

    def model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        names = {"bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=64, n_embd=32, n_layer=2, n_head=2, **names))


class BERT(Tokens):
    """transformers' BERT, with its dropout."""

    def model(self) -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=64,
        )  # fmt: skip
        return BertForMaskedLM(config)


class Text(Tokens):
    """transformers' RoFormer, an encoder with rotated positions."""

    padded: int | None = None

    def model(self) -> nn.Module:
        from transformers import RoFormerConfig, RoFormerForMaskedLM

        config = RoFormerConfig(
            vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=64, pad_token_id=self.padded, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return RoFormerForMaskedLM(config)


@pytest.mark.parametrize("task", [Segmenter(), Video(), Text()], ids=lambda task: type(task).__name__)
def test_models_of_others_learn_what_one_process_learns(pool: Pool, task: Task) -> None:
    """In fp64: batch normalisation of eight values turns fp32's rounding into 1e-3. Biases of keys stay at 1e-17."""
    plain = reference.train(task, STEPS, double=True)
    found, _ = pool.run("tests.parity.cell:train", 2, task, "domain=2,precision=fp64", STEPS)
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-9)
    for name, tensor in found["weights"].items():
        expected = plain["weights"][name]
        assert (tensor - expected).abs().max() <= 1e-7 * expected.abs().max() + 1e-12, name


@pytest.mark.parametrize(("task", "parts"), [(GPT2(), 2), (BERT(), 3)], ids=["GPT2-2", "BERT-3"])
def test_verify_finds_transformers_models_the_same(pool: Pool, task: Task, parts: int) -> None:
    """GPT-2 and BERT in fp32, with dropout of attention, embeddings and outputs as one process draws it."""
    [found] = verify(task, [f"domain={parts},threads=1"], run=runner(pool), steps=3)
    assert found.verdict == "same", found


def test_what_has_no_rule_is_refused_with_the_operator(pool: Pool) -> None:
    """RoFormer looks for padding at two places of each text, where its configuration has a token for that."""
    with pytest.raises(AssertionError, match=r"domain= has no rule for index"):
        pool.run("tests.parity.cell:train", 2, Text(padded=0), "domain=2", 1)
