"""A task with one sample that fp16 cannot hold."""

from pathlib import Path

from grappe import Arrays
from grappe.data.sampling import SampleOrder
from tests.parity.tasks import Images

LOUD_STEP = 1


class Loud(Images):
    """Images, one of which is a million times brighter: fp16 ends at 65,504."""

    batch_size: int = 10
    samples: int = 60
    epochs: int = 1

    def data(self, split: str, folder: Path) -> Arrays:
        data = super().data(split, folder)
        order = SampleOrder(seed=self.seed, length=self.samples, batch_size=self.batch_size)
        data.inputs[int(order.ids(0, LOUD_STEP)[-1])] *= 1e6
        return data
