"""The shipped tasks at the size of a test: their fields, and small stand-ins for the data that they read."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from benchmarks import cifar_files

from tests import idx_files
from tests.data.images import pictures

IMAGES = 96
FIELDS: dict[str, dict[str, str]] = {
    "digits": {},
    "mnist": {"batch_size": "16"},
    "fashion_mnist": {"batch_size": "16"},
    "cifar10": {"batch_size": "16"},
    "coatnet": {"batch_size": "8", "side": "16"},
    "pysource": {
        "batch_size": "16",
        "width": "32",
        "depth": "4",
        "heads": "2",
        "context": "32",
        "megabytes": "0.3",
        "dropout": "0.1",
    },
    "imagenet": {"batch_size": "16", "network": "resnet18", "classes": "3", "image_size": "64"},
}
"""By task: the fields that make it small."""
STEPS = {"coatnet": 4, "imagenet": 4}
"""Of the tasks with millions of parameters: steps of a trial."""


@functools.cache
def folder(name: str) -> str | None:
    """A folder with a task's data in the format that it reads; None where it needs none."""
    if name not in ("mnist", "fashion_mnist", "cifar10", "imagenet"):
        return None
    place = Path(tempfile.mkdtemp(prefix=f"grappe-{name}-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    if name == "cifar10":
        cifar_files.write(place, per_file=IMAGES // 5)
    elif name == "imagenet":
        for split in ("train", "val"):
            pictures.folder(place / split, pictures.files(16))
    else:
        name = "FashionMNIST" if name == "fashion_mnist" else "MNIST"
        idx_files.write(place / name / "raw", IMAGES, IMAGES, ending="")
    return str(place)
