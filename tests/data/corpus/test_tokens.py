"""Tests of windows and packed documents: every token is predicted once, and a packed document's loss is its own."""

import functools

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from grappe.checkpoint.initial import build
from grappe.data import Corpus, Packed, Windows, check_packing, document_mask
from grappe.data.corpus.tokens import IGNORED, best_fit, check_packed_data
from grappe.errors import DataError, TaskError
from grappe.task import Task
from tests.data.corpus.shards import corpus_folder


def documents_of(folder, seed=0, count=60, longest=90, vocabulary=48):
    """Writes documents as an Arrow file in batches and as a token file; returns them."""
    draws = np.random.default_rng(seed)
    documents = [draws.integers(1, vocabulary, draws.integers(1, longest)).astype(np.uint16) for _ in range(count)]
    folder.mkdir()
    table = pa.table({"tokens": pa.array([each.tolist() for each in documents], pa.list_(pa.uint16()))})
    with pa.OSFile(str(folder / "tokens.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=17)
    np.concatenate([np.append(each, 0) for each in documents]).astype("<u2").tofile(folder / "tokens.bin")
    return documents


def test_windows_cover_a_file(tmp_path):
    folder = corpus_folder(tmp_path / "tokens", ".bin")
    windows = Windows(Corpus(folder, dtype="uint16"), 16)
    whole = [np.fromfile(file, "<u2") for file in sorted(folder.glob("*.bin"))]
    expected = [each[16 * n : 16 * n + 17] for each in whole for n in range((len(each) - 1) // 16)]
    assert len(windows) == len(expected)
    for place, tokens in enumerate(expected):
        inputs, target = windows[place]
        assert inputs.tolist() == tokens[:-1].tolist() and target.tolist() == tokens[1:].tolist()
    with pytest.raises(DataError, match="no part of its"):
        Windows(Corpus(folder, dtype="uint16"), 10_000)


def test_windows_of_an_arrow_column(tmp_path):
    documents_of(tmp_path / "tokens")
    windows = Windows(Corpus(tmp_path / "tokens/tokens.arrow"), 8)
    first = np.fromfile(tmp_path / "tokens/tokens.bin", "<u2")
    assert windows[0][0].tolist() == first[first > 0][:8].tolist()
    with pytest.raises(DataError, match="no column 'text' of lists of tokens"):
        Windows(Corpus(corpus_folder(tmp_path / "text", ".arrow")), 8, column="text")


@pytest.mark.parametrize("form", ["arrow", "bin"])
def test_every_token_is_predicted_once(tmp_path, form):
    documents = documents_of(tmp_path / "tokens")
    options = {"dtype": "uint16", "end": 0} if form == "bin" else {}
    packed = Packed(Corpus(tmp_path / f"tokens/tokens.{form}", **options), 32)
    pairs = []
    for inputs, target in (packed[place] for place in range(len(packed))):
        real = target != IGNORED
        assert torch.equal(real, inputs["documents"] > 0)
        pairs += zip(inputs["input_ids"][real].tolist(), target[real].tolist(), strict=True)
        starts = inputs["position_ids"][real] == 0
        assert torch.equal(starts.cumsum(0), inputs["documents"][real])
    whole = [np.append(each, 0) for each in documents] if form == "bin" else documents
    expected = [pair for each in whole for pair in zip(each[:-1].tolist(), each[1:].tolist(), strict=True)]
    assert sorted(pairs) == sorted(expected)
    assert packed.filled > 0.95


def test_packing_is_a_function_of_the_data_and_the_seed(tmp_path):
    documents_of(tmp_path / "tokens")
    corpus = Corpus(tmp_path / "tokens/tokens.arrow")
    first, again, other = (Packed(corpus, 32, seed=seed) for seed in (0, 0, 1))
    assert len(list((tmp_path / "tokens").glob(".*.packed.grappe.npy"))) == 2

    def content(packed):
        return [packed[n][0]["input_ids"].tolist() for n in range(len(packed))]

    assert content(first) == content(again) != content(other)
    assert isinstance(again._starts, np.ndarray) and not again._starts.flags.owndata  # mapped


def test_best_fit_fills_bins():
    draws = np.random.default_rng(0)
    sizes = draws.integers(1, 101, 20_000)
    bins = best_fit(sizes, 100)
    filled = np.bincount(bins, weights=sizes)
    assert filled.max() <= 100 and filled.min() > 0
    assert len(filled) <= 1.01 * sizes.sum() / 100 + 1
    # as the textbook's best fit decreasing, piece by piece
    rooms: list[int] = []
    for size in sorted(sizes[:500].tolist(), reverse=True):
        fits = [(room, place) for place, room in enumerate(rooms) if room >= size]
        if fits:
            rooms[min(fits)[1]] -= size
        else:
            rooms.append(100 - size)
    assert best_fit(sizes[:500], 100).max() + 1 == len(rooms)


class Own(nn.Module):
    """A small transformer of one's own, causal or not; with a recurrent layer if asked for."""

    def __init__(self, recurrent=False):
        super().__init__()
        self.embed, self.place = nn.Embedding(48, 32), nn.Embedding(128, 32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 48)
        self.mixer = nn.GRU(32, 32, batch_first=True) if recurrent else None

    def forward(self, input_ids, position_ids, documents):
        hidden = self.embed(input_ids) + self.place(position_ids)
        if self.mixer is not None:
            hidden = hidden + self.mixer(hidden)[0]
        query, key, value = self.qkv(hidden).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=document_mask(documents))
        return self.out(hidden + mixed.transpose(1, 2).flatten(2))


class Published(nn.Module):
    """A model of transformers', given the mask of documents and their positions."""

    def __init__(self, name):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config, model = {
            "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
            "llama": ("LlamaConfig", "LlamaForCausalLM"),
            "bert": ("BertConfig", "BertForMaskedLM"),
        }[name]
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        if name == "gpt2":
            sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        if name == "bert":
            sizes |= {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
        self.causal = name != "bert"
        self.net = getattr(transformers, model)(getattr(transformers, config)(vocab_size=48, **sizes))

    def forward(self, input_ids, position_ids, documents):
        mask = document_mask(documents, causal=self.causal)
        extra = {} if self.causal else {"token_type_ids": torch.zeros_like(input_ids)}
        return self.net(input_ids=input_ids, position_ids=position_ids, attention_mask=mask, **extra).logits


@pytest.fixture(scope="module")
def sixteen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed") / "tokens"
    documents_of(folder, count=24, longest=30)
    packed = Packed(Corpus(folder / "tokens.arrow"), 48)
    rows = [packed[place] for place in range(len(packed))]
    inputs = {name: torch.stack([each[name] for each, _ in rows]) for name in rows[0][0]}
    return inputs, torch.stack([target for _, target in rows])


def summed(model, batches):
    """The loss of all tokens and its gradients; the same whatever is together."""
    model.zero_grad()
    total, count = 0.0, 0
    for inputs, target in batches:
        loss = cross_entropy(model(**inputs).flatten(0, 1), target.flatten(), reduction="sum", ignore_index=IGNORED)
        loss.backward()
        total, count = total + loss.item(), count + int((target != IGNORED).sum())
    return total / count, [parameter.grad / count for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("name", ["own", "gpt2", "llama", "bert"])
def test_loss_and_gradients_of_packed_documents_are_those_of_the_documents(sixteen, name):
    inputs, target = sixteen
    torch.manual_seed(0)
    model = Own() if name == "own" else Published(name)
    alone = []
    for row in range(len(target)):
        for number in range(1, int(inputs["documents"][row].max()) + 1):
            chosen = inputs["documents"][row] == number
            single = {key: value[row, chosen][None] for key, value in inputs.items()}
            alone.append(({**single, "documents": torch.ones_like(single["documents"])}, target[row, chosen][None]))
    assert len(alone) == 24 - sum(each[1].numel() == 0 for each in alone) or len(alone) <= 24
    packed_loss, packed = summed(model, [(inputs, target)])
    loss, gradients = summed(model, alone)
    assert abs(packed_loss - loss) < 1e-6
    for one, other in zip(packed, gradients, strict=True):
        assert (one - other).abs().max() < 1e-6
    check_packing(model, inputs)


def test_models_that_mix_documents_are_refused_by_name(sixteen):
    inputs, _ = sixteen
    with pytest.raises(TaskError, match=r"see each other in mixer \(GRU\)"):
        check_packing(Own(recurrent=True), inputs)
    blind = Own()
    blind.forward = lambda documents, **rest: Own.forward(blind, documents=torch.ones_like(documents), **rest)
    with pytest.raises(TaskError, match=r"see each other in out \(Linear\)"):
        check_packing(blind, inputs)


class Language(Task):
    """Trains on packed documents."""

    def model(self):
        return Own(recurrent=True)


def test_a_training_checks_packed_data_before_its_first_step(tmp_path):
    documents_of(tmp_path / "tokens")
    mixed = Corpus.mix({Packed(Corpus(tmp_path / "tokens/tokens.arrow"), 64): 1.0})
    with pytest.raises(TaskError, match=r"see each other in mixer \(GRU\)"):
        build(Language(), tmp_path / "checkpoints", None, check=functools.partial(check_packed_data, Language(), mixed))


def test_a_mamba_is_refused_by_name(sixteen):
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(vocab_size=48, hidden_size=16, state_size=4, num_hidden_layers=1)
    model = transformers.MambaForCausalLM(config)
    model.forward = lambda input_ids, call=model.forward, **_: call(input_ids=input_ids).logits
    with pytest.raises(TaskError, match=r"see each other in .*[Mm]ixer.*recurrent"):
        check_packing(model, sixteen[0])
