"""The error corpus: ways in which a task is wrong, each a change of one that works, and what is said of it."""

import dataclasses

HERE = "  # here"
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


@dataclasses.dataclass(frozen=True)
class Case:
    """A wrong task."""

    name: str
    changes: dict[str, str]
    """Parts of TASK, and what stands in their place."""
    says: str
    """Words of the message: what is wrong."""
    fix: str = ""
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


MODEL = "return Net()"
FORWARD = "h = self.first(x).tanh()"
OUTPUT = "return self.last(h)"
SAMPLE = "return self.x[index], index % 2"
LENGTH = "return 16"
DATA = "return Points(split)"
LOSS = 'return nn.functional.cross_entropy(output, target, reduction="none")'
OPTIMIZER = "return torch.optim.SGD(named_parameters, lr=0.1)"
LINEAR = "nn.Linear(3, 4)"
POINTS = "torch.linspace(-1, 1, 48)"
CLASS = "class Mine(grappe.Task):"


def also(text: str) -> dict[str, str]:
    """One more method of the task."""
    return {OPTIMIZER: f"{OPTIMIZER}\n\n{text}"}


def at(place: str) -> dict[str, str]:
    """A line of TASK, or the first line of a method, to be named."""
    line = next((line for line in TASK.splitlines() if f"def {place}(" in line), place)
    return {line: f"{line}{HERE}"}


CASES = (
    Case(
        "a layer takes another number of features",
        {LINEAR: "nn.Linear(5, 4)", **at(FORWARD)},
        "shapes cannot be multiplied (16x3 and 5x4)",
        "The inputs have 3 features and the layer takes 5: nn.Linear(3, 4)",
    ),
    Case(
        "the same in layers of torch's own",
        {**at("model"), MODEL: "return nn.Sequential(nn.Linear(5, 2))"},
        "shapes cannot be multiplied (16x3 and 5x2) (Linear.forward(), ",
        "nn.Linear(3, 2)",
    ),
    Case("NumPy's float64", {POINTS: f"{POINTS}.double()", **at(FORWARD)}, "but got Double and Float", "give float32"),
    Case("whole numbers as inputs", {POINTS: "torch.arange(48)", **at(FORWARD)}, "but got Long and Float", ".float()"),
    Case(
        "classes that are decimal numbers",
        {SAMPLE: SAMPLE.replace("index % 2", "index / 20"), **at(LOSS)},
        "expected target dtype to be Long",
        "target.long()",
    ),
    Case(
        "a class that the model has no output for",
        {SAMPLE: SAMPLE.replace("index % 2", "1 + index % 2"), **at(LOSS)},
        "Target 2 is out of bounds",
        "Classes are numbered from 0",
    ),
    Case(
        "another shape of the target",
        {LOSS: f"return nn.functional.mse_loss(output[:, 0], nn.functional.one_hot(target), reduction='none'){HERE}"},
        "must match the size of tensor b",
    ),
    Case(
        "classes that are words",
        {SAMPLE: SAMPLE.replace("index % 2", "'cat'"), **at(LOSS)},
        "argument 'target' (position 2) must be Tensor, not tuple",
        "number them in data()",
    ),
    Case(
        "CUDA in the model's forward",
        {FORWARD: f"h = self.first(x.cuda()).tanh(){HERE}"},
        "not compiled with CUDA",
        "Leave out .cuda(), .to(device) and device=",
    ),
    Case(
        "CUDA in model()",
        {MODEL: f"return Net().to('cuda'){HERE}"},
        "Mine.model() failed: AssertionError: Torch not compiled with CUDA",
        "Leave out .cuda()",
    ),
    Case("no return in model()", {MODEL: "Net()", **at("model")}, "Mine.model() returned NoneType", "an nn.Module"),
    Case(
        "no return in data()", {DATA: "Points(split)", **at("data")}, "('train') gave NoneType", "a `return` missing?"
    ),
    Case(
        "no return in loss()",
        {LOSS: LOSS.removeprefix("return "), **at("loss")},
        "Mine.loss() returned NoneType",
        "return a tensor of decimal numbers, one for each example",
    ),
    Case(
        "no return in optimizer()",
        {OPTIMIZER: OPTIMIZER.removeprefix("return "), **at("optimizer")},
        "Mine.optimizer() returned NoneType",
        "return a torch.optim.Optimizer",
    ),
    Case(
        "no return in the model's forward",
        {OUTPUT: "self.last(h)", **at(LOSS)},
        "argument 'input' (position 1) must be Tensor, not NoneType",
        "Is there a `return` missing in the model's forward()?",
    ),
    Case(
        "no return in __getitem__",
        {SAMPLE: SAMPLE.removeprefix("return "), **at("__getitem__")},
        "sample 0 of data() is None",
        "is a `return` missing?",
    ),
    Case(
        "a sample that is left out",
        {SAMPLE: f"return None if index == 13 else ({SAMPLE.removeprefix('return ')})", **at("__getitem__")},
        "sample 13 of data() is None",
        "To leave a sample out, do not count it",
    ),
    Case("a sample that raises", {SAMPLE: f"raise KeyError('no sample'){HERE}"}, "KeyError: 'no sample' ("),
    Case(
        "augment() gives the inputs only",
        also(f"    def augment(self, inputs, targets, keys):{HERE}\n        return inputs + 1\n"),
        "Mine.augment() gave Tensor [2, 3]",
        "`return inputs, targets`",
    ),
    Case(
        "an argument is missing",
        also(f"    def augment(self, inputs, targets):{HERE}\n        return inputs + 1, targets\n"),
        "Mine.augment() does not accept its arguments (too many positional arguments)",
        "write def augment(self, inputs, targets, keys)",
    ),
    Case(
        "a method without self",
        {"def model(self):": f"def model():{HERE}"},
        "Mine.model() does not accept its arguments",
        "write def model(self)",
    ),
    Case(
        "the loss is a mean",
        {LOSS: LOSS.replace(', reduction="none"', ""), **at("loss")},
        "Mine.loss() returned one number",
        'reduction="none"',
    ),
    Case(
        "the loss has no value for each example",
        {LOSS: f"{LOSS}.repeat(3, 1).mean(1)", **at("loss")},
        "Mine.loss() returned [3] for 16 rows",
        "return one value per example",
    ),
    Case(
        "the loss has no gradient",
        {LOSS: "return (output.argmax(1) != target).float()", **at("loss")},
        "does not require grad",
        "no detach(), .item(), argmax or no_grad",
    ),
    Case(
        "backward in the loss",
        {LOSS: f"{LOSS.replace('return', 'values =')}\n        values.sum().backward(){HERE}\n        return values"},
        "does not require grad",
        "leave backward() and step() to grappe",
    ),
    Case(
        "counts in another shape",
        also(f"    def counts(self, target):{HERE}\n        return torch.ones(len(target), 2)\n"),
        "counts() has shape [16, 2], loss() [16]",
        "they must be the same",
    ),
    Case(
        "counts of several losses by another name",
        {
            LOSS: "return {'size': output.square()}",
            **also(f"    def counts(self, target):{HERE}\n        return {{'sise': torch.ones(len(target), 2)}}\n"),
        },
        "counts() has the shapes {'sise': [16, 2]}, loss() {'size': [16, 2]}",
        "they must be the same",
    ),
    Case(
        "the target among the inputs",
        {
            **also(
                "    def collate(self, samples):\n"
                "        x, y = torch.utils.data.default_collate(samples)\n"
                "        return {'x': x, 'labels': y}, y\n"
            ),
            **at("forward"),
        },
        "got an unexpected keyword argument 'labels'",
        "let collate() give those that its forward() has",
    ),
    Case(
        "samples that are dicts",
        {SAMPLE: "return {'x': self.x[index], 'y': index % 2}", **at("data")},
        "do not show which part is input and which is target",
        "give Mine a def collate(self, samples)",
    ),
    Case(
        "samples of several shapes",
        {SAMPLE: "return self.x[index, : 1 + index % 3], 1", **at("data")},
        "cannot be put together by themselves (RuntimeError: stack expects each tensor to be equal size",
        "give Mine a def collate(self, samples)",
    ),
    Case(
        "collate() fails",
        also(
            "    def collate(self, samples):\n"
            f"        return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples]){HERE}\n"
        ),
        "Mine.collate() failed: TypeError: expected Tensor as element 0 in argument 0, but got int",
    ),
    Case(
        "in place on a leaf",
        {FORWARD: f"self.first.weight.add_(1){HERE}\n        {FORWARD}"},
        "a leaf Variable that requires grad is being used in an in-place operation",
        "make a new tensor, w + 1",
    ),
    Case(
        "in place on what backward needs",
        {FORWARD: f"{FORWARD}{HERE}\n        h += 1"},
        "backward needs the result of this line, which is changed in place afterwards",
        "make a new tensor, x = x + y",
    ),
    Case(
        "NumPy between inputs and loss",
        {FORWARD: f"{FORWARD}\n        h = torch.from_numpy(h.numpy()){HERE}"},
        "Can't call numpy() on Tensor that requires grad",
        "Keep to torch's functions",
    ),
    Case(
        "a loss that is no number",
        {FORWARD: f"{FORWARD}\n        h = (h - 10).sqrt()"},
        "the loss is nan in epoch 1, step 1 (sample ids ",
        "Try a lower lr, clip=1, or look at those samples",
    ),
    Case(
        "a relative import",
        {"import grappe\n": f"from .net import Other{HERE}\nimport grappe\n"},
        "attempted relative import with no known parent package",
        "write `from net import …`",
    ),
    Case(
        "a package that is not installed",
        {"import grappe\n": f"import no_such_package as smp{HERE}\nimport grappe\n"},
        "No module named 'no_such_package'",
        "Is it installed in this environment (pip install)",
    ),
    Case(
        "CUDA on import",
        {CLASS: f"NET = Net().cuda(){HERE}\n\n\n{CLASS}"},
        "cannot be loaded: AssertionError: Torch not compiled with CUDA",
        "Leave out .cuda()",
    ),
    Case("the file ends the program", {CLASS: f"exit(3){HERE}\n\n\n{CLASS}"}, "SystemExit: 3 ("),
    Case("no Python", {CLASS: "def broken(:"}, "SyntaxError: invalid syntax ("),
    Case("the file trains", also("\n\ngrappe.train(Mine())\n"), "the task's file starts processes itself"),
    Case("no task", {CLASS: "class Mine:"}, "derives from grappe.Task. A script runs as it is with grappe launch"),
    Case("no optimizer()", {"def optimizer(": "def optimiser("}, "Mine has no optimizer(): write it"),
    Case(
        "a dataset of length 0",
        {LENGTH: "return 0", **at("__len__")},
        "Mine.data('train') is empty",
        "check the folder and the split",
    ),
    Case(
        "a length without an end",
        {LENGTH: "return float('inf')", **at("__len__")},
        "has no length: 'float' object cannot be interpreted as an integer",
        "__len__ must return how many samples there are",
    ),
    Case(
        "a length that is too long",
        {LENGTH: "return 2**62", **at(SAMPLE)},
        "len(data()) is 4611686018427387904, but it has no sample for an index below that",
        "is __len__ right?",
    ),
    Case(
        "a stream that validates",
        {"data.Dataset)": "data.IterableDataset)", "def __getitem__(self, index)": "def __iter__(self)"},
        "is a stream: an evaluation sees",
    ),
    Case(
        "no validation data",
        {DATA: f"return {{'train': Points('train')}}[split]{HERE}"},
        "Mine.data() failed: KeyError: 'validation'",
        "grappe.split(dataset, split, validation=0.1)",
    ),
    Case(
        "a DataLoader",
        {DATA: "return torch.utils.data.DataLoader(Points(split))", **at("data")},
        "gave a DataLoader",
        "`return loader.dataset`",
    ),
    Case(
        "a pair of arrays",
        {DATA: "return Points(split).x, torch.zeros(16).long()", **at("data")},
        "gave a pair of arrays, not pairs of samples",
        "`return grappe.Arrays(inputs, targets)`",
    ),
    Case(
        "a file that is not there",
        {DATA: f"return open(folder / 'train.csv'){HERE}"},
        "No such file or directory: 'data/train.csv'",
        "gets the folder of --data",
    ),
    Case("data() ends the program", {DATA: f"raise SystemExit('no'){HERE}"}, "Mine.data() failed: SystemExit: no"),
    Case(
        "an optimizer of another model",
        {OPTIMIZER: OPTIMIZER.replace("named_parameters", "self.model().parameters()"), **at("optimizer")},
        "Mine.optimizer() has 4 parameters that are not the trained model's",
        "give it named_parameters",
    ),
    Case(
        "an optimizer that is given a model",
        {OPTIMIZER: f"return torch.optim.SGD(self.parameters(), lr=0.1){HERE}"},
        "has no attribute 'parameters'",
        "optimizer() gets pairs of a name and a parameter, not the model",
    ),
    Case(
        "an optimizer of no parameters",
        {OPTIMIZER: f"return torch.optim.SGD([p for name, p in named_parameters if 'none' in name], lr=0.1){HERE}"},
        "optimizer got an empty parameter list",
        "do the names match?",
    ),
    Case(
        "a model that is frozen whole",
        {MODEL: "return Net().requires_grad_(False)", **at("model")},
        "Mine.model() has no parameter to train",
        "is every requires_grad False",
    ),
    Case(
        "an optimizer that wants a closure, and does not say so",
        {
            OPTIMIZER: "class Climber(torch.optim.SGD):\n"
            "            def step(self, closure=None):\n"
            f"                assert closure is not None, 'Climber requires a closure'{HERE}\n\n"
            "        return Climber(named_parameters, lr=0.1)"
        },
        "Climber requires a closure",
        "optimizer.needs_closure = True",
    ),
    Case(
        "a schedule that wants a metric that is not there",
        also(
            f"    def schedule(self, optimizer, total_steps):{HERE}\n"
            "        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\n\n"
            "    monitor = 'accuracy'\n"
        ),
        "Mine.schedule() returned a ReduceLROnPlateau for monitor='accuracy', which no evaluation has",
        "there is: loss",
    ),
    Case(
        "a metric of other shapes",
        also(
            "    def metrics(self):\n"
            "        from torchmetrics.classification import BinaryAccuracy\n"
            "        return {'accuracy': BinaryAccuracy()}\n"
        ),
        "the metric 'accuracy' does not take what the model and the data give, an output Tensor [16, 2]",
        "expected to have the same shape",
    ),
    Case(
        "a metric that fails",
        also(
            "    def metrics(self):\n        import torchmetrics\n"
            "        class Failing(torchmetrics.Metric):\n"
            f"            def update(self, output, target):\n                raise ValueError('bad'){HERE}\n"
            "            def compute(self):\n                return torch.tensor(0.0)\n"
            "        return {'failing': Failing()}\n"
        ),
        "the metric 'failing' does not take what the model and the data give",
    ),
    Case(
        "a function as a metric",
        also(f"    def metrics(self):{HERE}\n        return {{'accuracy': lambda output, target: 0}}\n"),
        "Mine.metrics() has function for 'accuracy'",
        "give a metric of torchmetrics",
    ),
    Case(
        "lazy layers",
        {LINEAR: "nn.LazyLinear(4)", **at("model")},
        "has parameters without a shape (first.weight, first.bias)",
        "give lazy layers their sizes",
    ),
    Case(
        "a parameter that is made in forward",
        {
            FORWARD: f"{FORWARD}\n        if not hasattr(self, 'scale'):\n"
            f"            self.scale = nn.Parameter(torch.ones(4)){HERE}\n        h = h * self.scale"
        },
        "Net makes the parameter 'scale' in its forward",
        "make it in __init__()",
    ),
    Case(
        "a model that differs each time",
        {
            LINEAR: "nn.Linear(3, 4 + __import__('os').getpid() % 1000)",
            "nn.Linear(4, 2)": "nn.Linear(self.first.out_features, 2)",
        },
        "in the model and [",
        "does model() make the same one whenever it is called?",
    ),
    Case(
        "DistributedDataParallel in model()",
        {MODEL: f"return nn.parallel.DistributedDataParallel(Net()){HERE}"},
        "Default process group has not been initialized",
        "the plan spreads the model",
    ),
    Case(
        "DataParallel in model()",
        {MODEL: "return nn.DataParallel(Net())", **at("model")},
        "Mine.model() returned a DataParallel",
        "return the module in it",
    ),
    Case(
        "a field that is set later",
        {DATA: f"self.points = Points(split){HERE}\n        return self.points"},
        "cannot assign to field 'points'",
        "functools.cached_property",
    ),
    Case(
        "a field without its type", {"epochs: int": "epochs", **at(CLASS)}, "epochs = 1 has no type", "epochs: int = 1"
    ),
)
IN_PARTS = also("    def domain(self, inputs, targets):\n        return 1, None\n")
PARTS = (
    Case(
        "a function without a rule",
        {FORWARD: f"h = self.first(torch.fft.fft(x).real).tanh(){HERE}", **IN_PARTS},
        "domain= has no rule for _fft_r2c.default",
        "tell in the task's domain() to cut another dimension or none",
    ),
    Case(
        "values that are chosen by a mask",
        {FORWARD: f"h = self.first(x) * x[x > 0].mean(){HERE}", **IN_PARTS},
        "domain= has no rule for index.Tensor",
        "tell in the task's domain() to cut another dimension or none",
    ),
    Case(
        "a number that is read",
        {FORWARD: f"h = self.first(x) * x.max(dim=0)[0].tolist()[0]{HERE}", **IN_PARTS},
        "domain= has no rule for reading a tensor's numbers",
        "tell in the task's domain() to cut another dimension or none",
    ),
    Case(
        "no dimension that is plainly to be cut",
        {},
        "domain= cuts the height of images [B, C, H, …] or the length of token ids [B, T], and the inputs are torch.",
        "tell in the task's domain(self, inputs, targets) which dimension is cut",
    ),
    Case(
        "dimensions of the inputs alone",
        also(f"    def domain(self, inputs, targets):{HERE}\n        return 1\n"),
        "Mine.domain() gives 1",
        "return (dimensions of the inputs, of the targets), nested as they are",
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
