"""Remedies: what to do about the most common exceptions of tasks, recognised by Python's and torch's messages."""

from __future__ import annotations

import re
from collections.abc import Mapping

OVERWRITTEN = re.compile(r"has been modified by an inplace operation")
OTHER_SIZES = re.compile(r"distributed collective mismatch")
WITHOUT_GRADIENT = re.compile(r"does not require grad and does not have a grad_fn")

SCRIPTS = {
    r"No module named 'torch\.distributed\.pipeline\b":
        "torch has no Pipe since 2.4. A task has pipeline=2,microbatches=8 in its plan instead: docs/from-a-page.md",
    r"No module named 'horovod\b":
        "Horovod has to be built: docs/horovod.md. Without its lines grappe launch spreads the script by itself: "
        "--plan replicate=2",
    r"No module named 'torchtext\b":
        "torchtext ends at torch 2.3, and grappe needs 2.8: Hugging Face's datasets and tokenizers take its place",
    r"missing 1 required positional argument: 'task'":
        "torchmetrics asks for the kind of classes since 0.11: Accuracy(task='multiclass', num_classes=10)",
    r"\brank < size\. \d+ vs (\d+)":
        r"The script's process group is for \1, and there are more processes: give it their number, as --world_size 2",
    r"EADDRINUSE":
        "Another program has this port, or two processes have the same rank: take another port, and the rank from "
        "RANK or SLURM_PROCID, which grappe launch sets",
}  # fmt: skip
"""Remedies of scripts, of which some were written for older libraries."""
REMEDIES = {
    r"not compiled with CUDA|No CUDA GPUs|Found no NVIDIA driver|CUDA driver|No HIP GPUs|Invalid device id":
        "Leave out .cuda(), .to(device) and device=: the plan puts the model and the batches where they belong; a "
        "tensor that forward() makes gets device=x.device of its input x",
    r"Expected all tensors to be on the same device":
        "Make the tensor with device=x.device of an input x, or keep it in the module: register_buffer",
    r"(?:dtype|type).*\b(?:[Dd]ouble|float64)\b.*\b(?:[Ff]loat|float32)\b|same dtype.*(?:Double|double)":
        "Decimal numbers of NumPy and pandas are float64: give float32, as in .float() or astype('float32'). With "
        "precision=fp64, tensors made in forward() need dtype=x.dtype",
    r"same dtype.*\b(?:Long|Int|Byte|long|int|unsigned char)\b":
        "The inputs are whole numbers, and this layer takes decimal ones: .float()",
    r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x(\d+)\)":
        r"The inputs have \1 features and the layer takes \2: nn.Linear(\1, \3)",
    r"target dtype to be Long|expected scalar type Long but found":
        "Class numbers are whole: target.long()",
    r"Float can't be cast to the desired output type Long|Found dtype Long but expected Float":
        "This loss compares decimal numbers: target.float()",
    r"Target size .* must be the same as input size":
        "Give both one shape: output.squeeze(1), or target.unsqueeze(1)",
    r"Target -?\d+ is out of bounds":
        "Classes are numbered from 0, and the model has an output for each: is its last layer wide enough?",
    r"index out of range in self":
        "Numbers of an embedding's rows are from 0 to num_embeddings - 1: is it as large as the vocabulary?",
    r"argument 'target' .*must be Tensor, not (?:tuple|list|str)|batch must contain tensors.*class 'str'":
        "Words cannot be learned as they are: number them in data()",
    r"argument 'input' .*must be Tensor, not NoneType":
        "Is there a `return` missing in the model's forward()?",
    r"argument 'input' .*must be Tensor, not (?:tuple|list|dict)":
        "It has several parts: use one of them, such as x[0]",
    r"argument 'input' .*must be Tensor, not numpy|call numpy\(\) on Tensor that requires grad":
        "Keep to torch's functions between inputs and loss: gradients do not pass through NumPy",
    r"forward\(\) (?:got an unexpected keyword argument|missing \d+ required)":
        "Inputs that are a dict reach the model as keywords: let collate() give those that its forward() has, or "
        "write forward(self, model, inputs) in the task",
    r"leaf Variable that requires grad is being used in an in-place operation":
        "Change weights in after_step(self, model) of the task; in forward() make a new tensor, w + 1 instead of "
        "w.add_(1)",
    OVERWRITTEN.pattern:
        "Backward needs what an in-place operation (x += y, x.relu_(), x[i] = y) has changed: make a new tensor, "
        "x = x + y",
    WITHOUT_GRADIENT.pattern:
        "The loss must depend on the model's output by operations that have a gradient: no detach(), .item(), "
        "argmax or no_grad; and leave backward() and step() to grappe",
    r"attempted relative import":
        "A task's file is loaded by itself, with its folder on the path: write `from net import …` instead of "
        "`from .net import …`, or name the task as a module: package.module:Task",
    **SCRIPTS,
    r"No module named '([\w.]+)'":
        r"Is it installed in this environment (pip install), or in a file next to the task's?",
    r"cannot assign to field":
        "A task's fields are fixed once it is made: use a local variable, or functools.cached_property",
    r"'\w+' object has no attribute '(?:named_)?(?:parameters|modules)'":
        "optimizer() gets pairs of a name and a parameter, not the model: give them to the optimizer as they are, "
        "or in groups by grappe.optimizers.by_name",
    r"\b[Cc]losure\b":
        "If the optimizer's step() needs a closure, set optimizer.needs_closure = True in optimizer()",
    r"optimizer got an empty parameter list":
        "Give it named_parameters, or those of them that are to be trained: do the names match?",
    r"Default process group has not been initialized|rendezvous: environment variable":
        "Leave out DistributedDataParallel and init_process_group: the plan spreads the model, as in "
        "--plan replicate=2",
    r"'ascii' codec can't (?:de|en)code":
        "Here names and texts of files are ASCII: set PYTHONUTF8=1, or LC_ALL=C.UTF-8, or open(file, encoding='utf-8')",
    r"No such file or directory":
        "A task's paths are relative to the folder in which grappe is started; data(split, folder) gets the folder "
        "of --data",
    r"\A'(?:train|validation|test)'\Z":
        "data() is asked for 'train' and 'validation', and for 'test' by grappe evaluate: "
        "grappe.split(dataset, split, validation=0.1) cuts one that is in one piece",
    OTHER_SIZES.pattern:
        "The processes exchange tensors of other sizes. If forward() takes branches by its data: under shard= each "
        "process must use the same parameters, so use replicate=, or let every branch run on every process. If the "
        "model calls a collective: slices of a batch may differ by a row, so let the loss compare samples instead, "
        "with whole_batch_loss = True in the task",
    r"setStorage: .*out of bounds for storage of size 0":
        "Under shard= a module's weights are there while it runs: a derivative with respect to its inputs that is "
        "taken after it finds none, so use replicate=; where the output holds a parameter itself, give its clone()",
    r"uninitialized parameter":
        "A lazy layer has its sizes only after a forward: give them, as in nn.Linear(3, 4), or call the model once "
        "in model()",
}  # fmt: skip
"""Each pattern of what Python and torch say, and what to do about it; \\1 is the pattern's first group."""


def remedy(text: str, remedies: Mapping[str, str] = REMEDIES) -> str:
    """Returns what to do about an exception that says `text`; "" where nothing is known."""
    for pattern, what in remedies.items():
        if match := re.search(pattern, text, re.DOTALL):
            return match.expand(what) if "\\" in what else what
    return ""
