"""Computes from a run's newest checkpoint: a confusion matrix, pictures of samples, histograms of the weights.

Shapes: B samples of a batch, K classes; pictures of C x H x W.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from grappe.data.batch import SampleIds, inside
from grappe.data.datasets import dataset_of, prepare
from grappe.errors import GrappeError, TaskError
from grappe.errors.user_code import naming_user_line
from grappe.launch.terminal import progress
from grappe.task import split_name
from grappe.training.run import Run
from grappe.training.task_reference import resolve_task
from grappe.verbs.load import choose, data_of, load
from grappe.verbs.predict.inputs import BATCH, pair_reader
from grappe.words import count_of

SPLIT = "validation"
LARGEST_MATRIX = 50  # classes: a larger matrix cannot be read
CONFUSIONS = 20  # shown where there are more classes
PICTURES = 12  # of the mistakes with the highest loss, and of the first samples
BINS = 30  # of a histogram
TENSORS = 60  # whose values are counted, in the order of the model
LARGEST_SIDE = 64  # pixels of a picture in the page


def predicted(run: Run) -> dict[str, Any]:
    """Returns a run's predictions for its validation split by its newest checkpoint, as JSON; `why`: it has none."""
    try:
        return _predicted(run)
    except GrappeError as error:
        return {"why": str(error)}
    finally:
        progress("")


def _predicted(run: Run) -> dict[str, Any]:
    task = resolve_task(run, None).resolve()
    name = choose(run)[1].folder.name
    model = load(run, task)
    with naming_user_line(task):
        prepare(task, data_of(run, None))
        dataset = dataset_of(task, SPLIT, data_of(run, None))
        read, samples = pair_reader(task, dataset), len(dataset)  # pyrefly: ignore
        progress(f"predicting {count_of(samples, 'validation sample')} of {run.folder.name}")
        targets, classes, losses, number = *torch.zeros(3, 0), 0
        for first in range(0, samples, size := min(BATCH, task.batch_size)):
            ids = np.arange(first, min(first + size, samples))
            with torch.no_grad(), inside(SampleIds(task.seed, -1, ids)):
                inputs, target = read(ids)
                output = task.forward(model, inputs)
            both = isinstance(output, Tensor) and isinstance(target, Tensor) and target.shape == output.shape[:1]
            if not both or output.dim() != 2 or target.is_floating_point():
                raise TaskError(
                    f"{type(task).__name__} has no classes to compare: that takes an output [B, classes] and targets "
                    "[B] of whole numbers"
                )
            loss = F.cross_entropy(output.float(), target.long(), reduction="none")
            targets, classes = torch.cat([targets, target]), torch.cat([classes, output.argmax(1)])
            losses = torch.cat([losses, loss])
            number = output.shape[1]
        targets, classes = targets.long(), classes.long()
        wrong = (losses * (targets != classes)).topk(min(PICTURES, samples))
        chosen = [*wrong.indices[wrong.values > 0].tolist(), *range(min(PICTURES, samples))]
        pictures = _pictures(read(np.array(chosen))[0])
    shown = []
    for index, picture in zip(chosen, pictures, strict=False):
        target, predicted, loss = int(targets[index]), int(classes[index]), float(losses[index])
        shown.append({**picture, "sample": index, "target": target, "predicted": predicted, "loss": loss})
    matrix = torch.bincount(targets * number + classes, minlength=number**2).reshape(number, number)
    mistakes = matrix.clone().fill_diagonal_(0).flatten().topk(min(CONFUSIONS, matrix.numel()))
    return {
        "checkpoint": name,
        "split": split_name(task, SPLIT),
        "samples": samples,
        "right": int(matrix.trace()),
        "matrix": matrix.tolist() if number <= LARGEST_MATRIX else None,
        # The most frequent ones: class, prediction, samples.
        "confusions": [
            [*divmod(place, number), count]
            for place, count in zip(mistakes.indices.tolist(), mistakes.values.tolist(), strict=True)
            if count
        ],
        "losses": histogram(losses.double().clamp_min(1e-8).log10()),
        "pictures": shown,
    }


def histogram(values: Tensor, bins: int = BINS) -> dict[str, Any]:
    """Returns the numbers of finite values that are in each of equal bins, and the range of all bins."""
    finite = values[values.isfinite()].double()
    low, high = (float(end) for end in finite.aminmax()) if len(finite) else (0.0, 0.0)
    high = max(high, low + 1e-6 * abs(low), low + 1e-9)
    return {"from": low, "to": high, "samples": finite.histc(bins, low, high).long().tolist()}


def weights_of(run: Run) -> dict[str, Any]:
    """Returns the histogram of each floating-point tensor of the model, at most TENSORS, by name; {}: none is saved."""
    checkpoint = run.choose().checkpoint
    if checkpoint is None:
        return {}
    progress(f"reading the weights of {run.folder.name}")
    weights, made = checkpoint.read_model(), dict[str, Any]()
    for name in weights:
        values = weights.read(name).flatten()
        if values.is_floating_point() and len(values) > 1 and len(made) < TENSORS:
            made[name] = histogram(values, min(BINS, math.ceil(2 * len(values) ** (1 / 3))))  # Rice's rule
    progress("")
    return made


def _pictures(inputs: Any) -> list[dict[str, Any]]:
    """Makes RGBA pictures, base64, of inputs [B, C, H, W] with one channel or three; [] of others."""
    if not isinstance(inputs, Tensor) or inputs.dim() != 4 or inputs.shape[1] not in (1, 3):
        return []
    shown = inputs.float()
    if max(shown.shape[2:]) > LARGEST_SIDE:
        shown = F.interpolate(shown, scale_factor=LARGEST_SIDE / max(shown.shape[2:]), mode="area")
    low, high = shown.amin((1, 2, 3), keepdim=True), shown.amax((1, 2, 3), keepdim=True)
    colours = ((shown - low) / (high - low).clamp_min(1e-12) * 255).round().byte().expand(-1, 3, -1, -1)
    rgba = torch.cat([colours, torch.full_like(colours[:, :1], 255)], 1).permute(0, 2, 3, 1).contiguous()
    height, width = rgba.shape[1:3]
    return [
        {"width": width, "height": height, "pixels": base64.b64encode(picture.numpy().tobytes()).decode()}
        for picture in rgba
    ]
