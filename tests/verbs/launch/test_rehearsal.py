"""A rehearsal measures how a script's rows make up its batch; what it cannot keep is refused with the reason."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import indent
from types import ModuleType

import pytest

from grappe.verbs.launch.interception import intercepted, place_of
from grappe.verbs.launch.lengths import ScriptLoader
from grappe.verbs.launch.plan_keys import PlanKeys
from grappe.verbs.launch.rehearsal import Rehearsal, RehearsalOver
from grappe.verbs.launch.request import Rehearsed

SCRIPT = """import random
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
x, y = torch.randn(40, 6), torch.randint(0, 3, (40,))
model = {model}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = torch.zeros(20, 3)
for number, (inputs, labels) in enumerate(DataLoader(TensorDataset(x, y), 20)):
    optimizer.zero_grad()
{body}
    optimizer.step()
"""
NET = "nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))"
NORMALISED = "nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))"
PLAIN = "F.cross_entropy(model(inputs), labels).backward()"


def rehearse(
    folder: Path,
    body: str,
    model: str = NET,
    *,
    synchronised: bool = False,
    again: str = "",
    keys: PlanKeys | None = None,
    parts: int = 2,
) -> Rehearsed:
    """Rehearses a script in this process."""
    file = folder / "script.py"
    file.write_text(body if "import" in body else SCRIPT.format(model=model, body=indent(body, "    ")))
    rehearsal = Rehearsal(synchronised=synchronised, structural=[again] if again else [], keys=keys, parts=parts)
    loader = ScriptLoader(str(file), rehearsal.length, {"enumerate": rehearsal.counted})
    found = None
    before, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    with intercepted(rehearsal):
        try:
            loader.exec_module(sys.modules["__main__"])
        except RehearsalOver:
            found = rehearsal.found
        except Exception as error:
            if not rehearsal.in_part:
                raise
            found = rehearsal.failed(error)
        finally:
            sys.modules["__main__"] = before
    if found is not None and found.structural:
        return rehearse(folder, body, model, again=found.structural)
    return found or rehearsal.found


@pytest.mark.parametrize(
    ("body", "loss"),
    [
        pytest.param(PLAIN, "mean", id="dropout"),
        pytest.param("F.cross_entropy(model(inputs), labels, reduction='sum').backward()", "sum", id="sum"),
        pytest.param("(F.cross_entropy(model(inputs), labels) / 4).backward()", "mean", id="accumulation"),
        pytest.param("F.cross_entropy(model(inputs), labels, ignore_index=0).backward()", "counted", id="padding"),
        pytest.param(
            "F.cross_entropy(model(inputs), labels, weight=torch.tensor([1.0, 5.0, 9.0])).backward()",
            "counted",
            id="weights of classes",
        ),
        pytest.param(f"{PLAIN}\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)", "mean", id="clipping"),
        pytest.param(
            f"model[0].weight.register_hook(lambda gradient: gradient * (x[:8] > 0))\n{PLAIN}",
            "mean",
            id="a mask in a hook",
        ),
        pytest.param(
            "F.cross_entropy(model(inputs + torch.randn_like(inputs)), labels).backward()", "mean", id="noise"
        ),
        pytest.param(
            "F.cross_entropy(model(inputs * np.random.rand()), labels).backward()", "mean", id="a number by NumPy"
        ),
        pytest.param(
            "noise = torch.from_numpy(np.random.randn(*inputs.shape) + np.random.uniform(0, 1, (len(inputs), 6)))\n"
            "F.cross_entropy(model(inputs + noise.float()), labels).backward()",
            "mean",
            id="noise by NumPy",
        ),
        pytest.param(
            "loss = F.cross_entropy(model(inputs), labels)\n(loss + 0.1 * model[0].weight.square().sum()).backward()",
            "mean",
            id="penalty",
        ),
    ],
)
def test_the_loss_is_measured(tmp_path: Path, body: str, loss: str) -> None:
    found = rehearse(tmp_path, body)
    assert not found.refused
    assert list(found.losses.values()) == [loss]
    assert found.loader.endswith("script.py:13") and "script.py:13=>" in found.loader


def test_each_value_and_length_that_a_line_reads_is_measured(tmp_path: Path) -> None:
    body = """
output = model(inputs)
loss = F.cross_entropy(output, labels)
loss.backward()
right = (output.argmax(1) == labels).sum().item()
print(loss.item(), f"{loss:.4f}", output.max().item(), output.min().item(), optimizer.param_groups[0]["lr"])
print(right / len(labels), labels.size(0), inputs.shape[0], model[0].weight.grad.norm().item(), model[0].bias.shape[0])
rows = inputs.size(0)
ones = torch.ones(rows) * output[:, 0]
print(output[:8].std().item())
"""
    found = rehearse(tmp_path, body)
    assert not found.refused
    by_line: dict[int, list[str]] = {}
    for place, rule in found.values.items():
        by_line.setdefault(int(place.split(":")[1]), []).append(rule)
    assert by_line == {19: ["sum"], 20: ["mean", "mean", "most", "least"], 21: ["same"], 24: ["first"]}
    lines = sorted(place.rpartition(":")[0].rpartition(":")[2] for place in found.lengths)
    assert lines == ["21", "21", "21"], "the rows that make a tensor stay the part's"


OF_ROWS = {
    "inputs[:, 0]": "rows",
    "inputs.flatten()": "rows",
    "labels[labels > 0]": "rows",  # as many as there are in each part
    "torch.bincount(labels % {bins}, minlength={bins})": "sum",
    "torch.histc(inputs, {bins}, -3, 3)": "sum",
    "F.one_hot(labels % {bins}, {bins}).sum(0)": "sum",
    "wide.T @ F.one_hot(labels, 3).float()": "sum",
    "torch.zeros({bins}, {bins}).index_put((labels, labels), torch.ones(()), accumulate=True)": "sum",
    "wide.mean(0)": "mean",
    "wide.amax(0)": "most",
    "model[0].weight.grad": "same",
    "wide.std(0)": None,
    "torch.cov(wide.T)": None,
    "wide.median(0).values": None,
    "torch.quantile(inputs, torch.linspace(0, 1, {bins}))": None,
    "inputs - inputs.min()": None,
    "inputs / inputs.std(0)": None,
    "inputs.cumsum(0)": None,
    "inputs[:, 0].sort().values": None,
    "inputs.flip(0)": None,
    "output.softmax(0)": None,
    "inputs @ inputs.T": None,
    "inputs[:, 0].unique()": None,
}
"""What a line reads, and how processes' rows make up the whole batch's."""


@pytest.mark.parametrize("value", OF_ROWS)
def test_an_array_is_measured_by_its_elements_however_many_there_are(value: str, tmp_path: Path) -> None:
    for bins, exit in ((6, "numpy()"), (10, "numpy()"), (14, "tolist()"), (20, "numpy()")):  # as a part has rows, say
        body = f"wide = inputs[:, torch.arange({bins}) % 6]\noutput = model(inputs)\n{PLAIN}\n"
        found = rehearse(
            tmp_path, f"{body}({value.format(bins=bins)}).detach().{exit}", "nn.Sequential(nn.Linear(6, 3))"
        )
        if OF_ROWS[value] is None:
            assert "script.py, line 18 reads a value of the batch that is neither" in found.refused
        else:
            assert not found.refused and list(found.values.values()) == [OF_ROWS[value]], bins


@pytest.mark.parametrize(
    ("read", "rule"),
    [
        ("(labels > 5).sum().item()", "sum"),
        ("(labels > 5).float().sum().detach().item()", "sum"),
        ("(labels > 5).float().mean().item()", "mean"),
        ("inputs.clamp(0, 0.01).max().item()", "most"),
        ("labels.min().item()", "least"),
        ("(labels > 5).any().item()", "most"),
        ("bool((labels > 5).all())", "least"),
        ("bool(F.cross_entropy(model(inputs), labels) < 9)", "same"),
    ],
)
def test_numbers_that_do_not_show_their_rule_have_that_of_the_function_that_made_them(
    read: str, rule: str, tmp_path: Path
) -> None:
    assert list(rehearse(tmp_path, f"{PLAIN}\n{read}").values.values()) == [rule]


@pytest.mark.parametrize(
    ("read", "rule"),
    [
        ("inputs[0].tolist()", "first"),
        ("inputs[0, 0].item()", "first"),
        ("inputs[:8].tolist()", "first"),
        ("(inputs * (inputs == x[3]).any())[:5].tolist()", None),
        ("(inputs[:, 0] == x[3, 0]).nonzero().sum().item()", None),
        ("inputs[:, 0].argsort()[0].item()", None),
        ("(inputs[:, :1] == x[[7, 12, 16], 0]).unique().tolist()", "same"),  # by chance in each half, and checked
        ("((inputs == x[3]).sum() / ((inputs == x[3]) | (inputs == x[5])).sum().clamp(min=1)).item()", None),
        ("((inputs == x[3]).sum() / 1).item()", "same"),  # or a sum: a run ends where it is not
        ("inputs[:, 1].sort().values[-1].item()", "most"),
    ],
)
def test_a_rule_that_fits_the_first_rows_by_chance_is_none(read: str, rule: str | None, tmp_path: Path) -> None:
    found = rehearse(tmp_path, f"{PLAIN}\n{read}")
    if rule is None:
        assert "script.py, line 16 reads a value of the batch that is neither" in found.refused
    else:
        assert list(found.values.values()) == [rule], found.refused


@pytest.mark.parametrize(
    ("body", "model", "why"),
    [
        pytest.param(PLAIN, NORMALISED, "batchnorm=sync in the plan", id="batch normalisation"),
        pytest.param(
            "losses = F.cross_entropy(model(inputs), labels, reduction='none')\n(losses[labels > 0].mean()).backward()",
            NET,
            "script.py, line 16) is not that of its rows together",
            id="a mean over ragged parts",
        ),
        pytest.param(
            "z = F.normalize(model(inputs), dim=1)\nF.cross_entropy(z @ z.T, torch.arange(len(z))).backward()",
            NET,
            "a loss of the whole batch",
            id="contrastive",
        ),
        pytest.param(
            "F.cross_entropy(model(inputs - inputs.mean(0)), labels).backward()",
            NET,
            "rows that meet in the model",
            id="statistics by hand",
        ),
        pytest.param(
            "for each in model.parameters():\n"
            f"    each.register_hook(lambda gradient: gradient.clamp(-20, 20))\n{PLAIN}",
            NET,
            "a hook that clips gradients",
            id="gradients clipped in a hook, later than in the first batch",
        ),
        pytest.param(
            "output = model(inputs)\noutput.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))\n"
            "F.cross_entropy(output, labels).backward()",
            NET,
            "a hook that clips gradients",
            id="rows' gradients clipped in a hook",
        ),
        pytest.param(
            "noise = torch.tensor([[random.random()] * 6 for _ in inputs])\n"
            "F.cross_entropy(model(inputs + noise), labels).backward()",
            NET,
            "numbers of Python's generator are in the loss, or of NumPy's for something else than rows",
            id="noise by Python",
        ),
        pytest.param(
            "noise = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(number))\n"
            "F.cross_entropy(model(inputs + noise), labels).backward()",
            NET,
            "a permutation of the rows, or a generator of its own",
            id="a generator of its own",
        ),
        pytest.param(
            "order = torch.randperm(len(inputs))\n"
            "F.cross_entropy(model(0.7 * inputs + 0.3 * inputs[order]), labels).backward()",
            NET,
            "not drawn for each row by torch's generator",
            id="mixup",
        ),
        pytest.param(
            "state = (0.5 * state + model(inputs)).detach() + model(inputs)\nF.cross_entropy(state, labels).backward()",
            NET,
            "script.py, line 15 ends in RuntimeError",
            id="hidden state",
        ),
        pytest.param(
            "output = model(inputs)\nF.cross_entropy(output, labels).backward()\nprint(output.std().item())",
            NET,
            "script.py, line 17 reads a value of the batch that is neither a mean",
            id="a deviation that is read",
        ),
        pytest.param(
            f"{PLAIN}\nprint(inputs.mean())",
            NET,
            "script.py, line 16 reads a value of the batch that is neither a mean",
            id="several values and yes or no by a printed tensor",
        ),
        pytest.param(
            "def closure():\n    loss = F.cross_entropy(model(inputs), labels)\n    loss.backward()\n    return loss\n"
            "optimizer.step(closure)",
            NET,
            "step(closure) runs the batch several times",
            id="closure",
        ),
        pytest.param(
            "loader = DataLoader(TensorDataset(x, y), 20)\nfor _ in range(99):\n"
            "    inputs, labels = next(iter(loader))\n    F.cross_entropy(model(inputs), labels).backward()",
            NET,
            "its first 50 backwards came from no loop over a torch.utils.data.DataLoader",
            id="next of a new iterator",
        ),
        pytest.param(
            "import torch\nweight = torch.zeros(3, requires_grad=True)\noptimizer = torch.optim.SGD([weight], 0.1)\n"
            "weight.sum().backward()\noptimizer.step()\n",
            NET,
            "no loop over a torch.utils.data.DataLoader takes a step",
            id="no loader",
        ),
    ],
)
def test_what_processes_would_not_learn_is_refused(tmp_path: Path, body: str, model: str, why: str) -> None:
    assert why in rehearse(tmp_path, body, model).refused


@pytest.mark.parametrize(
    ("counter", "made"), [("done", "done = 0"), ("model.done", "model.done = 0"), ("now.done", "now = Now()")]
)
def test_what_a_script_does_with_its_first_batch_alone_is_measured_in_each_pass(
    counter: str, made: str, tmp_path: Path
) -> None:
    body = f"if not {counter}:\n    print(output.mean().item())\n{counter} += 1"
    script = SCRIPT.format(model="Net()", body=indent(f"output = model(inputs)\n{PLAIN}\n{body}", "    "))
    classes = f"class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.net = {NET}\n"
    classes += (
        "    def forward(self, x):\n        return self.net(x)\nclass Now:\n    done = 0\n    def __init__(self):\n"
    )
    script = script.replace("torch.manual_seed(1)", f"{classes}        self.done = 0\ntorch.manual_seed(1)")
    found = rehearse(tmp_path, script.replace("state = torch.zeros(20, 3)", made))
    assert list(found.values.values()) == ["mean"]


@pytest.mark.parametrize(
    ("body", "own"),
    [
        ("for row in inputs:\n    state[0] += 1", ["`state`"]),
        ("state.append(10**400)", []),
        ("state.extend(inputs)", ["`state`"]),
        ("state[0] = state[0] + (labels > 0).sum()", ["`state`"]),
        ("weight = weight + (labels > 0).sum()", ["`weight`"]),
        ("weight += labels.size(0)\ninputs = inputs + 1", []),
        ("table[number] = inputs.size()[0]", ["`table`"]),
        ("for each in labels:\n    table[each] += 1", ["`table`"]),
        ("table[labels[0]] += 1\nfor row, by in zip(inputs.clone(), labels):\n    row[by:] = 0", []),
        ("print('rows', inputs.size()[0])", ["script.py, line 18"]),
        ("shape = inputs.shape\nprint(shape)", ["script.py, line 19"]),
        ("print(*[str(int(label > 5)) for label in labels.numpy()])", []),
        ("for number, _ in enumerate(model):\n    state[0] += number\nprint(number, state, inputs.shape)", []),
        ("state[0] += len(labels)\nrows = len(inputs)\ntorch.rand(rows)\nprint('%d' % len(inputs), rows)", []),
        ("state[0] = 0.9 * state[0] + F.cross_entropy(model(inputs), labels).item()\nprint(state)", []),
    ],
)
def test_a_count_of_rows_that_a_run_would_not_know_is_named(body: str, own: list[str], tmp_path: Path) -> None:
    script = SCRIPT.format(model=NET, body=indent(f"{PLAIN}\n{body}", "    "))
    found = rehearse(
        tmp_path,
        script.replace(
            "state = torch.zeros(20, 3)",
            "state, weight, table = [0], torch.tensor(0), np.zeros(3)\nkept = iter(DataLoader(x, 20))\nnext(kept)",
        ),
    )
    assert not found.refused and found.own_rows == own


def test_a_place_is_the_same_however_often_it_is_reached() -> None:
    places = set()

    class Read:
        def __float__(self) -> float:
            places.add(place_of(sys._getframe(1)))
            return 0.0

    read = Read()
    for _ in range(100):
        float(read), float(read)  # other columns
    assert len(places) == 2


def test_the_first_gradient_is_that_of_the_first_optimizer(tmp_path: Path) -> None:
    body = """optimizer.zero_grad()
    for net, step in ((model, optimizer), (other, torch.optim.SGD(other.parameters(), lr=0.1))):
        F.cross_entropy(net(inputs), labels).backward()
        step.step()"""
    made = "other = nn.Linear(6, 3)"
    found = rehearse(tmp_path, SCRIPT.format(model=NET, body=f"    {body}").replace("state = torch.zeros(20, 3)", made))
    assert [norm > 0 for norm in found.norms] == [True] * 4 + [False] * 2


def test_batch_normalisation_over_all_processes_is_measured_without_its_statistics(tmp_path: Path) -> None:
    found = rehearse(tmp_path, PLAIN, NORMALISED, synchronised=True)
    assert not found.refused and list(found.losses.values()) == ["mean"]
