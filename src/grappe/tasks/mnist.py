"""LeNet on MNIST's handwritten digits."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from grappe import Arrays, Download
from grappe.tasks.fashion_mnist import FashionMnist, idx_files

SOURCE = "https://yann.lecun.com/exdb/mnist (about 12 MB)"
PLACES = ("mnist", "MNIST/raw")  # below the data folder, where others' files have the same names
FILES = tuple(
    Download(
        url=f"https://storage.googleapis.com/cvdf-datasets/mnist/{name}-ubyte.gz",
        size=size,
        sha256=sha256,
        folder="mnist",
    )
    for name, size, sha256 in (
        ("train-images-idx3", 9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        ("train-labels-idx1", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        ("t10k-images-idx3", 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        ("t10k-labels-idx1", 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    )
)


class Mnist(FashionMnist):
    """LeNet on MNIST's digits; the last twelfth of the training images is kept for validation."""

    downloads: ClassVar[tuple[Download, ...]] = FILES
    lr: float = 0.1

    def data(self, split: str, folder: Path) -> Arrays:
        return idx_files(split, folder, PLACES, SOURCE, "mnist", self.holdout)
