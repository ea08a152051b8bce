"""The user's own line, or the layer of torch, that an exception came from, and what to do about it."""

import pytest
import torch

from grappe.errors.user_code import layer_of, sentence


def test_a_layer_that_torch_calls_by_a_function_is_named() -> None:
    with pytest.raises(IndexError) as caught:
        torch.nn.Sequential(torch.nn.Embedding(3, 2))(torch.tensor([3]))
    assert layer_of(caught.value) == "Embedding.forward()"
    assert "as large as the vocabulary" in sentence(caught.value)


def test_texts_that_are_ascii_here_have_a_remedy() -> None:
    with pytest.raises(UnicodeDecodeError) as caught:
        "é".encode().decode("ascii")
    assert "PYTHONUTF8=1" in sentence(caught.value)
