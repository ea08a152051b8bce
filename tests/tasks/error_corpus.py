"""The error corpus: ways in which a task is wrong, each a change of one that works, and what is said of it."""

from __future__ import annotations

import dataclasses

HERE = "# here"
"""Marks the line that the message must name."""
TASK = """\
import torch
from torch import nn
import grappe


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        h = self.first(x).tanh()
        return self.last(h)


class Points(torch.utils.data.Dataset):
    def __init__(self, split):
        self.x = torch.linspace(-1, 1, 48).view(16, 3)

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return self.x[index], index % 2


class Mine(grappe.Task):
    epochs: int = 1
    batch_size: int = 8

    def model(self):
        return Net()

    def data(self, split, folder):
        return Points(split)

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.1)
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A wrong task."""

    name: str
    changes: dict[str, str]
    """Parts of TASK, and what stands in their place."""
    says: str
    """Words of the message: what is wrong."""
    fix: str
    """And what to do."""

    @property
    def text(self) -> str:
        """The task's file."""
        text = TASK
        for old, new in self.changes.items():
            assert text.count(old) == 1, (self.name, old)
            text = text.replace(old, new)
        return text

    @property
    def line(self) -> int | None:
        """The number of the line that must be named; None: the fault has none."""
        lines = [n for n, line in enumerate(self.text.splitlines(), 1) if HERE in line]
        assert len(lines) <= 1, self.name
        return lines[0] if lines else None


MODEL = "        return Net()\n"
FORWARD = "        h = self.first(x).tanh()\n"
OUTPUT = "        return self.last(h)\n"
SAMPLE = "        return self.x[index], index % 2\n"
LENGTH = "        return 16\n"
DATA = "        return Points(split)\n"
LOSS = '        return nn.functional.cross_entropy(output, target, reduction="none")\n'
OPTIMIZER = "        return torch.optim.SGD(named_parameters, lr=0.1)\n"
LINEAR = "nn.Linear(3, 4)"
POINTS = "torch.linspace(-1, 1, 48)"


def also(text: str) -> dict[str, str]:
    """One more method of the task."""
    return {OPTIMIZER: f"{OPTIMIZER}\n{text}"}


def here(text: str) -> dict[str, str]:
    """A line of TASK, to be named."""
    return {text: text.replace("\n", f"  {HERE}\n")}


def method(name: str) -> dict[str, str]:
    """The first line of a method of TASK, to be named."""
    line = next(line for line in TASK.splitlines(keepends=True) if f"def {name}(" in line)
    return here(line)


CASES = (
    Case(
        name="a layer takes another number of features",
        changes={LINEAR: "nn.Linear(5, 4)", **here(FORWARD)},
        says="shapes cannot be multiplied (16x3 and 5x4)",
        fix="The inputs have 3 features and the layer takes 5: nn.Linear(3, 4)",
    ),
    Case(
        name="the same in layers of torch's own",
        changes={**method("model"), MODEL: "        return nn.Sequential(nn.Linear(5, 2))\n"},
        says="shapes cannot be multiplied (16x3 and 5x2) (Linear.forward(), ",
        fix="nn.Linear(3, 2)",
    ),
    Case(
        name="NumPy's float64",
        changes={POINTS: f"{POINTS}.double()", **here(FORWARD)},
        says="must have the same dtype, but got Double and Float",
        fix="give float32",
    ),
    Case(
        name="inputs that are whole numbers",
        changes={POINTS: "torch.arange(48)", **here(FORWARD)},
        says="must have the same dtype, but got Long and Float",
        fix=".float()",
    ),
    Case(
        name="classes that are decimal numbers",
        changes={SAMPLE: SAMPLE.replace("index % 2", "index / 20"), **here(LOSS)},
        says="expected target dtype to be Long",
        fix="target.long()",
    ),
    Case(
        name="a class that the model has no output for",
        changes={SAMPLE: SAMPLE.replace("index % 2", "1 + index % 2"), **here(LOSS)},
        says="Target 2 is out of bounds",
        fix="Classes are numbered from 0",
    ),
    Case(
        name="another shape of the target",
        changes={
            LOSS: "        return nn.functional.mse_loss(output[:, 0], nn.functional.one_hot(target), "
            f"reduction='none').sum(1)  {HERE}\n"
        },
        says="must match the size of tensor b",
        fix="",
    ),
    Case(
        name="classes that are words",
        changes={SAMPLE: SAMPLE.replace("index % 2", "'cat'"), **here(LOSS)},
        says="argument 'target' (position 2) must be Tensor, not tuple",
        fix="number them in data()",
    ),
    Case(
        name="CUDA in the model's forward",
        changes={FORWARD: f"        h = self.first(x.cuda()).tanh()  {HERE}\n"},
        says="not compiled with CUDA",
        fix="Leave out .cuda(), .to(device) and device=",
    ),
    Case(
        name="CUDA in model()",
        changes={MODEL: f"        return Net().to('cuda')  {HERE}\n"},
        says="Mine.model() failed: AssertionError: Torch not compiled with CUDA",
        fix="Leave out .cuda()",
    ),
    Case(
        name="no return in model()",
        changes={MODEL: "        Net()\n", **method("model")},
        says="Mine.model() returned NoneType",
        fix="return an nn.Module",
    ),
    Case(
        name="no return in data()",
        changes={DATA: "        Points(split)\n", **method("data")},
        says="Mine.data('train') gave NoneType",
        fix="Is a `return` missing?",
    ),
    Case(
        name="no return in loss()",
        changes={LOSS: LOSS.replace("return ", ""), **method("loss")},
        says="Mine.loss() returned NoneType",
        fix="return a tensor of decimal numbers, one for each example",
    ),
    Case(
        name="no return in optimizer()",
        changes={OPTIMIZER: OPTIMIZER.replace("return ", ""), **method("optimizer")},
        says="Mine.optimizer() returned NoneType",
        fix="return a torch.optim.Optimizer",
    ),
    Case(
        name="no return in the model's forward",
        changes={OUTPUT: OUTPUT.replace("return ", ""), **here(LOSS)},
        says="argument 'input' (position 1) must be Tensor, not NoneType",
        fix="Is there a `return` missing in the model's forward()?",
    ),
    Case(
        name="no return in __getitem__",
        changes={SAMPLE: "        self.x[index], index % 2\n", **method("__getitem__")},
        says="sample 0 of data() is None",
        fix="is a `return` missing?",
    ),
    Case(
        name="a sample that is left out",
        changes={SAMPLE: f"        if index == 13:\n            return None\n{SAMPLE}", **method("__getitem__")},
        says="sample 13 of data() is None",
        fix="To leave a sample out, do not count it",
    ),
    Case(
        name="augment() gives the inputs only",
        changes=also(f"    def augment(self, inputs, targets, keys):  {HERE}\n        return inputs + 1\n"),
        says="Mine.augment() gave Tensor [2, 3]",
        fix="`return inputs, targets`",
    ),
    Case(
        name="an argument is missing",
        changes=also(f"    def augment(self, inputs, targets):  {HERE}\n        return inputs + 1, targets\n"),
        says="Mine.augment() does not accept its arguments (too many positional arguments)",
        fix="write def augment(self, inputs, targets, keys)",
    ),
    Case(
        name="a method without self",
        changes={"def model(self):": f"def model():  {HERE}"},
        says="Mine.model() does not accept its arguments",
        fix="write def model(self)",
    ),
    Case(
        name="the loss is a mean",
        changes={LOSS: LOSS.replace(', reduction="none"', ""), **method("loss")},
        says="Mine.loss() returned one number",
        fix='reduction="none"',
    ),
    Case(
        name="the loss has no value for each example",
        changes={LOSS: LOSS.replace("\n", ".repeat(3, 1).mean(1)\n"), **method("loss")},
        says="Mine.loss() returned [3] for 16 rows",
        fix="return one value per example",
    ),
    Case(
        name="the loss has no gradient",
        changes={LOSS: "        return (output.argmax(1) != target).float()\n", **method("loss")},
        says="does not require grad",
        fix="no detach(), .item(), argmax or no_grad",
    ),
    Case(
        name="backward in the loss",
        changes={
            LOSS: LOSS.replace("return", "values =") + f"        values.sum().backward()  {HERE}\n"
            "        return values\n"
        },
        says="does not require grad",
        fix="leave backward() and step() to grappe",
    ),
    Case(
        name="counts in another shape",
        changes=also(f"    def counts(self, target):  {HERE}\n        return torch.ones(len(target), 2)\n"),
        says="counts() has shape [16, 2], loss() [16]",
        fix="they must be the same",
    ),
    Case(
        name="counts of several losses by another name",
        changes={
            LOSS: "        return {'size': output.square()}\n",
            **also(f"    def counts(self, target):  {HERE}\n        return {{'sise': torch.ones(len(target), 2)}}\n"),
        },
        says="counts() has the shapes {'sise': [16, 2]}, loss() {'size': [16, 2]}",
        fix="they must be the same",
    ),
    Case(
        name="the target among the inputs",
        changes={
            **also(
                "    def collate(self, samples):\n"
                "        x, y = torch.utils.data.default_collate(samples)\n"
                "        return {'x': x, 'labels': y}, y\n"
            ),
            **method("forward"),
        },
        says="got an unexpected keyword argument 'labels'",
        fix="let collate() give those that its forward() has",
    ),
    Case(
        name="samples that are dicts",
        changes={SAMPLE: "        return {'x': self.x[index], 'y': index % 2}\n", **method("data")},
        says="do not show which part is input and which is target",
        fix="give Mine a def collate(self, samples)",
    ),
    Case(
        name="samples of several shapes",
        changes={SAMPLE: "        return self.x[index, : 1 + index % 3], 1\n", **method("data")},
        says="cannot be put together by themselves (RuntimeError: stack expects each tensor to be equal size",
        fix="give Mine a def collate(self, samples)",
    ),
    Case(
        name="collate() fails",
        changes=also(
            "    def collate(self, samples):\n"
            f"        return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])  {HERE}\n"
        ),
        says="Mine.collate() failed: TypeError: expected Tensor as element 0 in argument 0, but got int",
        fix="",
    ),
    Case(
        name="in place on a leaf",
        changes={FORWARD: f"        self.first.weight.add_(1)  {HERE}\n{FORWARD}"},
        says="a leaf Variable that requires grad is being used in an in-place operation",
        fix="make a new tensor, w + 1",
    ),
    Case(
        name="in place on what backward needs",
        changes={FORWARD: f"{FORWARD.rstrip()}  {HERE}\n        h += 1\n"},
        says="backward needs the result of this line, which is changed in place afterwards",
        fix="make a new tensor, x = x + y",
    ),
    Case(
        name="NumPy between inputs and loss",
        changes={FORWARD: f"{FORWARD}        h = torch.from_numpy(h.numpy())  {HERE}\n"},
        says="Can't call numpy() on Tensor that requires grad",
        fix="Keep to torch's functions",
    ),
    Case(
        name="a loss that is no number",
        changes={FORWARD: f"{FORWARD}        h = (h - 10).sqrt()\n"},
        says="the loss is nan in epoch 1, step 1 (sample ids ",
        fix="Try a lower lr, clip=1, or look at those samples",
    ),
    Case(
        name="a relative import",
        changes={"import grappe\n": f"import grappe\nfrom .net import Other  {HERE}\n"},
        says="attempted relative import with no known parent package",
        fix="write `from net import …`",
    ),
    Case(
        name="a package that is not installed",
        changes={"import grappe\n": f"import grappe\nimport no_such_package as smp  {HERE}\n"},
        says="No module named 'no_such_package'",
        fix="Is it installed in this environment (pip install)",
    ),
    Case(
        name="CUDA on import",
        changes={"class Mine": f"NET = Net().cuda()  {HERE}\n\n\nclass Mine", MODEL: "        return NET\n"},
        says="cannot be loaded: AssertionError: Torch not compiled with CUDA",
        fix="Leave out .cuda()",
    ),
    Case(
        name="a dataset of length 0",
        changes={LENGTH: "        return 0\n", **method("__len__")},
        says="Mine.data('train') is empty",
        fix="check the folder and the split",
    ),
    Case(
        name="a length without an end",
        changes={LENGTH: "        return float('inf')\n", **method("__len__")},
        says="has no length: 'float' object cannot be interpreted as an integer",
        fix="__len__ must return how many samples there are",
    ),
    Case(
        name="a length that is too long",
        changes={LENGTH: "        return 2**62\n", **here(SAMPLE)},
        says="len(data()) is 4611686018427387904, but it has no sample for an index below that",
        fix="is __len__ right?",
    ),
    Case(
        name="no validation data",
        changes={DATA: f"        return {{'train': Points('train')}}[split]  {HERE}\n"},
        says="Mine.data() failed: KeyError: 'validation'",
        fix="grappe.split(dataset, split, validation=0.1)",
    ),
    Case(
        name="a DataLoader",
        changes={DATA: "        return torch.utils.data.DataLoader(Points(split))\n", **method("data")},
        says="gave a DataLoader",
        fix="`return loader.dataset`",
    ),
    Case(
        name="a pair of arrays",
        changes={DATA: "        return Points(split).x, torch.zeros(16).long()\n", **method("data")},
        says="gave a pair of arrays, not pairs of samples",
        fix="`return grappe.Arrays(inputs, targets)`",
    ),
    Case(
        name="a file that is not there",
        changes={DATA: f"        return open(folder / 'train.csv')  {HERE}\n"},
        says="No such file or directory: 'data/train.csv'",
        fix="gets the folder of --data",
    ),
    Case(
        name="data() ends the program",
        changes={DATA: f"        raise SystemExit('no data')  {HERE}\n"},
        says="Mine.data() failed: SystemExit: no data",
        fix="",
    ),
    Case(
        name="an optimizer of another model",
        changes={OPTIMIZER: OPTIMIZER.replace("named_parameters", "self.model().parameters()"), **method("optimizer")},
        says="Mine.optimizer() has 4 parameters that are not the trained model's",
        fix="give it named_parameters",
    ),
    Case(
        name="an optimizer that is given a model",
        changes={OPTIMIZER: f"        return torch.optim.SGD(self.parameters(), lr=0.1)  {HERE}\n"},
        says="has no attribute 'parameters'",
        fix="optimizer() gets pairs of a name and a parameter, not the model",
    ),
    Case(
        name="an optimizer of no parameters",
        changes={
            OPTIMIZER: "        named_parameters = [p for name, p in named_parameters if 'head' in name]\n"
            f"{OPTIMIZER.rstrip()}  {HERE}\n"
        },
        says="optimizer got an empty parameter list",
        fix="do the names match?",
    ),
    Case(
        name="a model that is frozen whole",
        changes={MODEL: "        return Net().requires_grad_(False)\n", **method("model")},
        says="Mine.model() has no parameter to train",
        fix="is every requires_grad False",
    ),
    Case(
        name="an optimizer that wants a closure, and does not say so",
        changes={
            OPTIMIZER: "        class Climber(torch.optim.SGD):\n"
            "            def step(self, closure=None):\n"
            f"                assert closure is not None, 'Climber requires a closure'  {HERE}\n"
            "\n"
            "        return Climber(named_parameters, lr=0.1)\n"
        },
        says="Climber requires a closure",
        fix="optimizer.needs_closure = True",
    ),
    Case(
        name="a schedule that wants a metric that is not there",
        changes=also(
            f"    def schedule(self, optimizer, total_steps):  {HERE}\n"
            "        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\n"
            "\n"
            "    monitor = 'accuracy'\n"
        ),
        says="Mine.schedule() returned a ReduceLROnPlateau for monitor='accuracy', which no evaluation has",
        fix="there is: loss",
    ),
    Case(
        name="a metric of other shapes",
        changes=also(
            f"    def metrics(self):  {HERE}\n"
            "        from torchmetrics.classification import BinaryAccuracy\n"
            "        return {'accuracy': BinaryAccuracy()}\n"
        ),
        says="the metric 'accuracy' does not take what the model and the data give, an output Tensor [16, 2]",
        fix="expected to have the same shape",
    ),
    Case(
        name="a metric that fails",
        changes=also(
            "    def metrics(self):\n        import torchmetrics\n"
            "        class Failing(torchmetrics.Metric):\n"
            f"            def update(self, output, target):\n                raise ValueError('bad')  {HERE}\n"
            "            def compute(self):\n                return torch.tensor(0.0)\n"
            "        return {'failing': Failing()}\n"
        ),
        says="the metric 'failing' does not take what the model and the data give",
        fix="",
    ),
    Case(
        name="a function as a metric",
        changes=also(f"    def metrics(self):  {HERE}\n        return {{'accuracy': lambda output, target: 0}}\n"),
        says="Mine.metrics() has function for 'accuracy'",
        fix="give a metric of torchmetrics",
    ),
    Case(
        name="lazy layers",
        changes={LINEAR: "nn.LazyLinear(4)", **method("model")},
        says="has parameters without a shape (first.weight, first.bias)",
        fix="give lazy layers their sizes",
    ),
    Case(
        name="a parameter that is made in forward",
        changes={
            FORWARD: f"{FORWARD}        if not hasattr(self, 'scale'):\n"
            f"            self.scale = nn.Parameter(torch.ones(4))  {HERE}\n        h = h * self.scale\n"
        },
        says="Net makes the parameter 'scale' in its forward",
        fix="make it in __init__()",
    ),
    Case(
        name="a model that differs each time",
        changes={
            LINEAR: "nn.Linear(3, 4 + __import__('os').getpid() % 1000)",
            "nn.Linear(4, 2)": "nn.Linear(self.first.out_features, 2)",
        },
        says="in the model and [",
        fix="does model() make the same one whenever it is called?",
    ),
    Case(
        name="DistributedDataParallel in model()",
        changes={MODEL: f"        return nn.parallel.DistributedDataParallel(Net())  {HERE}\n"},
        says="Default process group has not been initialized",
        fix="the plan spreads the model",
    ),
    Case(
        name="DataParallel in model()",
        changes={MODEL: "        return nn.DataParallel(Net())\n", **method("model")},
        says="Mine.model() returned a DataParallel",
        fix="return the module in it",
    ),
    Case(
        name="a field that is set later",
        changes={DATA: f"        self.points = Points(split)  {HERE}\n        return self.points\n"},
        says="cannot assign to field 'points'",
        fix="functools.cached_property",
    ),
    Case(
        name="a field without its type",
        changes={
            "    epochs: int = 1\n": "    epochs = 1\n",
            "class Mine(grappe.Task):": f"class Mine(grappe.Task):  {HERE}",
        },
        says="epochs = 1 has no type",
        fix="write epochs: int = 1",
    ),
)
IN_PARTS = also("    def domain(self, inputs, targets):\n        return 1, None\n")
PARTS = (
    Case(
        name="a function without a rule",
        changes={FORWARD: f"        h = self.first(torch.fft.fft(x).real).tanh()  {HERE}\n", **IN_PARTS},
        says="domain= has no rule for torch.fft.fft",
        fix="write it with functions that have one, such as matmul, or tell in the task's domain() to leave this input",
    ),
    Case(
        name="values that are chosen by a mask",
        changes={FORWARD: f"        h = self.first(x) * x[x > 0].mean()  {HERE}\n", **IN_PARTS},
        says="domain= has no rule for an index that is a tensor or a list",
        fix="choose by slices, by numbers, or multiply by a mask",
    ),
    Case(
        name="a number that is read",
        changes={FORWARD: f"        h = self.first(x) * x.max(dim=0)[0].tolist()[0]  {HERE}\n", **IN_PARTS},
        says="domain= has no rule for reading a tensor's numbers",
        fix="compute with tensors, or read what sum() and mean() give",
    ),
    Case(
        name="no dimension that is plainly to be cut",
        changes={},
        says="domain= cuts the height of images [B, C, H, …] or the length of token ids [B, T], and the inputs are "
        "torch.float32 [",
        fix="tell in the task's domain(self, inputs, targets) which dimension is cut",
    ),
    Case(
        name="dimensions of the inputs alone",
        changes=also(f"    def domain(self, inputs, targets):  {HERE}\n        return 1\n"),
        says="Mine.domain() gives 1",
        fix="return (dimensions of the inputs, of the targets), nested as they are",
    ),
)
"""Cases that are tried under domain=2 alone."""
BOTH = (
    "a layer takes another number of features",
    "no return in loss()",
    "the loss has no gradient",
    "in place on what backward needs",
    "an optimizer of another model",
    "a parameter that is made in forward",
    "a sample that is left out",
    "a loss that is no number",
)
"""Cases that are tried under replicate=2 too: what fails in forward, backward or update of several processes."""
