"""State in a model's attributes: the same under every plan, exact on resume, apart from evaluation, or refused."""

import gc
import re
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import grappe
from grappe import Arrays, Sampling, Task
from grappe.checkpoint.format import list_checkpoints
from grappe.engines.shared.carried import CarriedState, attributes_kept
from grappe.parallel.attributes import copied_attributes
from grappe.plan import Plan
from tests.faults import resuming
from tests.faults.resume_cell import hashes, hashes_of
from tests.gallery.cell import runner
from tests.parity.cell import TOLERANCE, difference
from tests.processes import Pool

COLUMNS, CHUNKS, LENGTH = 4, 6, 3
RARE = 3  # only in the second half of the columns at first


class Recurrent(nn.Module):
    """A cell over a chunk of each column; the last state is the next chunk's first."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed, self.cell, self.head = (nn.Embedding(7, 5), nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 7))
        self.way = way
        self.hidden: Any = None
        self.last: Any = None
        self.calls = 0
        self.history: list[Any] = []
        self.noise = torch.Generator().manual_seed(4)
        self.strange = object()
        self.length = 0
        self.table: Any = None

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.hidden
        if self.way != "hidden" or hidden is None or hidden[0].shape[1] != len(tokens):
            hidden = None
        output, state = self.cell(self.embed(tokens), hidden)
        self.last = output.detach()
        if self.length != tokens.shape[1]:  # as rotary embeddings keep their tables
            self.length = tokens.shape[1]
            self.table = torch.linspace(0.5, 1, 6 * self.length).view(self.length, 6)
        output = output * self.table
        if self.way == "rare":
            self.calls += int((tokens[:, 0] == RARE).any())
            return self.head(output) * (1 + 0.1 * self.calls)
        if self.way == "numbers":
            self.calls += 1
            self.history = [*self.history, float(self.calls)]
            self.strange = object() if self.strange else None
            return self.head(output) * (1 + 0.1 * self.calls) + torch.rand(1, generator=self.noise)
        self.hidden = tuple(part.detach() for part in state)
        return self.head(output)


class Stream(Task):
    """Four columns of text, read chunk by chunk."""

    epochs: int = 2
    batch_size: int = COLUMNS
    way: Literal["hidden", "numbers", "rare"] = "hidden"
    consecutive_batches = True

    def model(self) -> nn.Module:
        return Recurrent(self.way)

    def data(self, split: str, folder: Path) -> Arrays:
        text = torch.randint(0, 7, (COLUMNS, CHUNKS, LENGTH + 1), generator=torch.Generator().manual_seed(8))
        rows = text.transpose(0, 1).flatten(0, 1)  # all columns' first chunks, then their second ones
        return Arrays(rows[:, :-1], rows[:, 1:])

    def sampling(self, dataset: Any) -> Sampling:
        return Sampling(shuffle=False)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.transpose(1, 2), target, reduction="none").mean(1)

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.5, momentum=0.5)

    def units(self, model: nn.Module) -> list[nn.Module]:
        return [model.embed, model.cell, model.head]


STEPS = CHUNKS - 1  # in mid-epoch


def train(pool: Pool, plan: str) -> Any:
    return pool.run("tests.engines.shared.teachers:train", Plan.parse(plan).processes, Stream(), plan, STEPS)[0]


def part(pool: Pool, task: Stream, plan: str, run: Path, steps: int, **options: Any) -> str:
    return resuming.run(pool, task, plan, run, steps=steps, save_every=1, **{"evaluate_every": 1, **options})


@pytest.mark.parametrize(
    "plan", ["replicate=2", "shard=2", "compile", "engine=textbook,replicate=2", "engine=lightning,replicate=2"]
)
def test_hidden_states_are_those_of_one_process(pool: Pool, plan: str) -> None:
    alone, spread = train(pool, ""), train(pool, plan)
    assert difference(alone["weights"], spread["weights"])[0] <= TOLERANCE
    assert spread["scores"].loss == pytest.approx(alone["scores"].loss, rel=1e-5)


@pytest.mark.parametrize(
    ("way", "plan"), [("hidden", "replicate=2"), ("hidden", "shard=2"), ("numbers", ""), ("rare", "replicate=2")]
)
def test_they_resume_to_the_bit_in_mid_epoch(pool: Pool, tmp_path: Path, way: Any, plan: str) -> None:
    said = part(pool, Stream(way=way), plan, tmp_path / "whole", STEPS)
    for steps in (2, STEPS):
        part(pool, Stream(way=way), plan, tmp_path / "run", steps)
    assert hashes(tmp_path / "run", STEPS) == hashes(tmp_path / "whole", STEPS)
    prefix = "carried.1." if way == "rare" else "carried.0."
    assert any(name.startswith(prefix) for name in hashes(tmp_path / "run", STEPS))
    assert ("attribute 'strange' changes, and is not saved (object)" in said) == (way == "numbers")


@pytest.mark.parametrize(("first", "second"), [("replicate=2", ""), ("", "replicate=2")])
def test_rows_are_cut_again_for_another_number_of_processes(pool, tmp_path, first, second):
    part(pool, Stream(), "", tmp_path / "whole", STEPS)
    part(pool, Stream(), first, tmp_path / "run", 2)
    part(pool, Stream(), second, tmp_path / "run", STEPS)
    models = [grappe.load(tmp_path / run, Stream()).state_dict() for run in ("whole", "run")]
    assert difference(*models)[0] <= TOLERANCE


def test_evaluation_changes_nothing_and_no_activation_is_saved(pool: Pool, tmp_path: Path) -> None:
    kept = []
    for folder, every in (("seldom", STEPS), ("often", 1)):
        part(pool, Stream(), "", tmp_path / folder, STEPS, evaluate_every=every)
        kept.append(list_checkpoints(tmp_path / folder / "checkpoints"))
    for pair in zip(*kept, strict=True):
        seldom, often = ({**hashes_of(one), "json": ""} for one in pair)
        assert seldom == often
    carried = [name for name in hashes_of(kept[0][0]) if name.startswith("carried.0.")]
    assert carried == [f"carried.0.{number}" for number in range(3)]


def test_verify_judges_it_and_names_it(pool: Pool) -> None:
    [verdict] = grappe.verify(Stream(), ["replicate=2,threads=1,device=cpu"], run=runner(pool))
    assert verdict.verdict == "same", verdict
    assert "forward keeps hidden, length for the next batch" in verdict.notes


@pytest.mark.parametrize("plan", ["microbatches=2", "recompute", "exact=2"])
def test_plans_whose_next_forward_has_other_rows_are_refused(pool: Pool, plan: str) -> None:
    said = train(pool, plan)
    assert re.match(rf"TaskError: .*attribute 'hidden'.*under {plan} the next forward is not that of the same", said)


class Observed(nn.Module):
    """A layer that keeps its inputs' largest numbers in a buffer, which has none at first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(LENGTH, 1)
        self.register_buffer("most", torch.zeros(0))

    def forward(self, inputs: Tensor) -> Tensor:
        most = inputs.detach().amax(0)
        self.most.resize_(most.shape).copy_(most)
        return self.layer(inputs * self.most)


class Loaded(Observed):
    """The same, loaded as torch's observers are."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.most.resize_(state_dict[f"{prefix}most"].shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Observing(Task):
    """Regression by a model that changes a buffer's shape."""

    epochs: int = 3
    batch_size: int = 4
    loaded: bool = True

    def model(self) -> nn.Module:
        return Loaded() if self.loaded else Observed()

    def data(self, split: str, folder: Path) -> Arrays:
        inputs = torch.randn(8, LENGTH, generator=torch.Generator().manual_seed(2))
        return Arrays(inputs, inputs.sum(1, keepdim=True))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2).flatten(1).mean(1)

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.05)


def test_a_buffer_that_forward_resizes_is_resumed_to_the_bit_and_loaded(pool: Pool, tmp_path: Path) -> None:
    part(pool, Observing(), "", tmp_path / "whole", 5)
    for steps in (2, 5):
        part(pool, Observing(), "", tmp_path / "run", steps)
    assert hashes(tmp_path / "run", 5) == hashes(tmp_path / "whole", 5)
    assert grappe.load(tmp_path / "run", Observing()).state_dict()["most"].shape == (LENGTH,)


@pytest.mark.parametrize(
    ("loaded", "plan", "said"),
    [
        *((True, plan, "each process or microbatch") for plan in ("replicate=2", "microbatches=2", "exact=2")),
        (True, "engine=textbook,replicate=2", "each process or microbatch"),
        (False, "", "no checkpoint of it could be loaded"),
    ],
)
def test_a_buffer_that_forward_resizes_is_refused(pool: Pool, loaded: bool, plan: str, said: str) -> None:
    task = Observing(loaded=loaded)
    found = pool.run("tests.engines.shared.teachers:train", Plan.parse(plan).processes, task, plan, 2)[0]
    assert found.startswith(f"TaskError: forward changes the shape of the buffer 'most' from [0] to [{LENGTH}]")
    assert said in found


class Graph(nn.Module):
    """Features and edges of a graph in plain attributes, and a state that forward writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.edges = torch.ones(7, 11, 13), torch.eye(7).to_sparse()
        self.state = torch.zeros(3)

    def forward(self) -> None:
        self.state += 1


def test_what_does_not_change_is_in_memory_once() -> None:
    model, carried = Graph(), CarriedState()
    carried.begin(model, Plan())
    before = copied_attributes(model)
    model()
    carried.keep_first(before)
    assert carried.changed().keys() == {("", "state")}
    del before
    tensors = [each for each in gc.get_objects() if type(each) is Tensor and not each.is_nested]
    alive = [each for each in tensors if each.shape == (7, 11, 13)]
    assert [each is model.features for each in alive] == [True]
    model.features.data[6, 10, 12] = 2  # without a sign of it on the tensor
    model.edges = model.edges * 2
    model.state.zero_()
    assert carried.changed().keys() == {("", "features"), ("", "edges")}


def test_transformers_hooks_are_installed_once() -> None:
    """With its hooks twice, each hidden state was collected twice, and hidden_states[1] was the embedding."""
    made = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 3}
    model = made.BertModel(made.BertConfig(vocab_size=9, **sizes))
    carried, tokens = CarriedState(), torch.arange(6)[None]
    carried.begin(model, Plan())
    for _ in range(2):
        with attributes_kept(model):
            assert len(model(tokens, output_hidden_states=True).hidden_states) == 1 + 3
    assert not carried.changed(), "a resumed model would have the mark without the hooks"
