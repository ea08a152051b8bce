"""Messages and bytes of a training step under domain=, counted, against formulas of shapes alone."""

import math

import pytest
from torch import nn

from grappe import Task
from grappe.domain.parts import Domain
from tests.parity.test_domain import GPT, MODELS, SHAPES, ResNet
from tests.processes import Pool

FLOAT, BATCH = 4, 6  # bytes of a number, samples of a step


class Stack(ResNet):
    """Convolutions whose halos are 1, 2 and 1 rows, of images of 3 channels, 11 rows and 12 columns."""


MODELS["Stack"] = lambda: nn.Sequential(
    nn.Conv2d(3, 4, 3, padding=1),
    nn.Conv2d(4, 5, 5, padding=2),
    nn.BatchNorm2d(5),
    nn.ReLU(),
    nn.Conv2d(5, 6, (3, 1), padding=(1, 0)),
    nn.GroupNorm(2, 6),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(6, 3),
)
SHAPES["Stack"] = (3, 11, 12)

Sent = dict[tuple[str, str], int]


def of_stack(rank: int, parts: int) -> Sent:
    """Returns what a process sends in a step of Stack.

    A convolution whose kernel has k rows needs k // 2 rows of each neighbour. A process so sends k // 2 rows of the
    inputs to each neighbour, and in backward, the adjoint of that, k // 2 rows of the inputs' gradient to the process
    whose rows they are. The images need no gradient, so that the first convolution has one direction.

    A normalisation sums over the processes. Batch normalisation: in forward the mean and the mean of squares in double
    precision at once, and in backward two sums at once, each one number a channel. Group normalisation: in forward the
    values and then the squares of their differences from the mean, and in backward two sums at once, each one number a
    sample and group. The mean over the image stays a process's term until the classes' scores are read, whose gradient
    every process has.
    """
    neighbours = (rank > 0) + (rank < parts - 1)
    of_each = [BATCH * channels * (kernel // 2) * 12 * FLOAT for channels, kernel in ((3, 3), (4, 5), (5, 3))]
    sums = [2 * 2 * 5, 2 * 5, BATCH * 2, BATCH * 2, 2 * BATCH * 2, BATCH * 3]
    return {
        ("halos", "messages"): 5 * neighbours,
        ("halos", "bytes"): (of_each[0] + 2 * of_each[1] + 2 * of_each[2]) * neighbours,
        ("sums", "messages"): len(sums),
        ("sums", "bytes"): sum(sums) * FLOAT,
    }


def of_gpt(rank: int, parts: int) -> Sent:
    """Returns what a process sends in a step of GPT: 9 positions of width 16, two layers of attention.

    Keys and values are two tensors of [samples, positions, width]. The first layer is causal: a process sends its part
    of both to the later processes, in forward and, as they are not kept, again in backward; there it also sends the
    earlier processes the gradients of their parts. The second is written out as products with all keys and with all
    values: a process sends both to all others, again in backward, and gets the gradients of its part from all.
    All else (embeddings, normalisations, linear layers, the loss) has positions by themselves and sends nothing.
    """
    positions = [9 // parts + (each < 9 % parts) for each in range(parts)]
    own, before, after = positions[rank], sum(positions[:rank]), parts - 1 - rank
    causal = 2 * own * after + before  # positions: in forward and again in backward, and their gradients
    every = 2 * own * (parts - 1) + (9 - own)
    return {
        ("attention", "messages"): 2 * (2 * after + rank) + 2 * 3 * (parts - 1),
        ("attention", "bytes"): 2 * BATCH * 16 * FLOAT * (causal + every),
    }


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize(("task", "formula"), [(Stack(), of_stack), (GPT(), of_gpt)], ids=["Stack", "GPT"])
def test_messages_and_bytes_of_a_step_are_those_of_the_formulas(pool: Pool, task: Task, formula, parts: int) -> None:
    """The gradients of all parameters are summed over the processes as well, once a step, by DDP."""
    parameters = sum(each.numel() for each in task.model().parameters())
    for rank, trained in enumerate(pool.run("tests.parity.cell:train", parts, task, f"domain={parts}", 2)):
        expected = {**formula(rank, parts), ("gradients", "bytes"): parameters * FLOAT}
        assert trained["sent"] == expected
        shown = Domain(summed=None, rank=rank, size=parts)
        shown.of_step.update(expected)
        assert trained["remarks"] == shown.remarks()


def test_under_shards_a_slice_sends_its_own_and_gradients_are_summed_in_parts(pool: Pool) -> None:
    """Slices have 2 and 4 of the 6 samples; the second shard has the smaller half of a parameter's rows."""
    shapes = [each.shape for each in MODELS["GPT"]().parameters()]
    for rank, trained in enumerate(pool.run("tests.parity.cell:train", 4, GPT(), "domain=2,shard=2", 2)):
        alone, shard = of_gpt(rank % 2, 2), rank // 2
        held = sum(math.prod(shape[1:]) * ((shape[0] + 1 - shard) // 2) for shape in shapes)
        assert trained["sent"] == {
            ("attention", "messages"): alone["attention", "messages"],
            ("attention", "bytes"): alone["attention", "bytes"] * (2, 4)[shard] // BATCH,
            ("gradients", "bytes"): held * FLOAT,
        }
