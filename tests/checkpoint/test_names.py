"""Names of others' weights: compared as they are first, then without wrappers; tied weights; what differs."""

import pytest
import torch
from torch import Tensor, nn

from grappe.checkpoint.foreign_training import Matched, copy_values, differences, match
from grappe.checkpoint.weights import InMemory
from grappe.errors import UsageError
from grappe.tasks.cifar10 import Small


class Inside(nn.Module):
    """A model whose layers are all below one attribute."""

    def __init__(self, attribute: str, inner: nn.Module) -> None:
        super().__init__()
        setattr(self, attribute, inner)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.decoder.weight = self.encoder.weight


class Page(nn.Module):
    """The layers of `Net` in the page's cifar10-cpu.py."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.pool, self.conv2 = nn.Conv2d(3, 6, 5), nn.MaxPool2d(2, 2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84), nn.Linear(84, 10)


def filled(model: nn.Module, content: dict[str, Tensor]) -> Matched:
    """Copies the content into the model, which it must fit; returns the match."""
    matched = match(model, InMemory(content))
    assert not matched.missing, differences(matched.missing, matched.left)
    assert not matched.left, differences(matched.missing, matched.left)
    copy_values(matched, InMemory(content), "--from a.pt")
    return matched


@pytest.mark.parametrize("attribute", ["net", "model", "backbone"])
@pytest.mark.parametrize("wrapped", ["", "module.", "_orig_mod.", "model.", "module.model."])
def test_a_model_below_one_attribute(attribute: str, wrapped: str) -> None:
    given, model = Inside(attribute, nn.Linear(2, 3)), Inside(attribute, nn.Linear(2, 3))
    filled(model, {wrapped + name: tensor for name, tensor in given.state_dict().items()})
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in given.state_dict().items())


def test_weights_of_the_inner_model_alone_and_of_a_model_around() -> None:
    inner, outer = nn.Linear(2, 3), Inside("net", nn.Linear(2, 3))
    filled(outer, inner.state_dict())
    assert torch.equal(outer.net.weight, inner.weight)  # type: ignore[union-attr]
    torch.nn.init.zeros_(inner.weight)
    filled(inner, outer.state_dict())
    assert torch.equal(outer.net.weight, inner.weight)  # type: ignore[union-attr]


@pytest.mark.parametrize("names", [["encoder.weight"], ["decoder.weight"], ["encoder.weight", "decoder.weight"]])
def test_tied_weights_under_any_of_their_names(names: list[str]) -> None:
    model, value = Tied(), torch.randn(7, 3)
    filled(model, dict.fromkeys(names, value))
    assert torch.equal(model.decoder.weight, value)
    assert model.decoder.weight is model.encoder.weight


def test_a_tied_weight_with_two_values_is_refused() -> None:
    content = {"encoder.weight": torch.zeros(7, 3), "decoder.weight": torch.ones(7, 3)}
    with pytest.raises(UsageError, match=r"encoder\.weight and decoder\.weight differ there, and are one tensor"):
        filled(Tied(), content)


def test_the_pages_checkpoint_is_taken_by_its_shapes_and_said() -> None:
    given, model = Page(), Small()
    matched = filled(model, given.state_dict())
    assert torch.equal(model[0][0].weight, given.conv1.weight)  # type: ignore[index]
    assert torch.equal(model[4].bias, given.fc3.bias)
    assert "each shape is there once: took conv1.weight as 0.0.weight, conv1.bias as 0.0.bias" in matched.note
    assert "and 5 more" in matched.note


@pytest.mark.parametrize(
    "content",
    [
        {"a": torch.ones(3, 3), "b": torch.ones(3, 3)},  # which is which?
        {"a": torch.ones(3, 3), "b": torch.ones(2)},
        {"a": torch.ones(3, 3)},
        {"0.weight": torch.ones(3, 3), "b": torch.ones(3)},  # a name that is the model's: the others are to be as well
    ],
)
def test_nothing_is_taken_by_shapes_that_could_mean_something_else(content: dict[str, Tensor]) -> None:
    model = nn.Sequential(nn.Linear(3, 3)) if len(content) > 1 else nn.Sequential(nn.Linear(3, 3, bias=False))
    if list(content) == ["a"]:
        model.append(nn.Linear(3, 3, bias=False))
    matched = match(model, InMemory(content))
    assert matched.missing
    assert not matched.note


def test_the_message_has_five_names_of_each_side_and_the_nearest() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    content = {f"{name.replace('.', '_')}": tensor for name, tensor in model.state_dict().items()}
    matched = match(model, InMemory(content))
    assert differences(matched.missing, matched.left) == (
        "Missing: 0.weight, 0.bias, 1.weight, 1.bias, 2.weight and 3 more. "
        "Left over: 0_weight, 0_bias, 1_weight, 1_bias, 2_weight and 3 more. "
        "Nearest: 0.weight -> 0_weight, 0.bias -> 0_bias, 1.weight -> 1_weight, 1.bias -> 1_bias, "
        "2.weight -> 2_weight"
    )
    assert differences({"head.weight": (5, 2)}, {"head.weigth": (3, 2), "x": (9,)}).endswith(
        "Nearest: head.weight -> head.weigth"
    )
    assert differences({"a": (5, 2)}, {"zzzzz": (3, 2)}) == "Missing: a. Left over: zzzzz"
