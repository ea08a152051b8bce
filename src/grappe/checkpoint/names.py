"""Names the prefixes of the tensors in a checkpoint."""

from __future__ import annotations

MODEL = "model."
"""`model.NAME`: a parameter, whole or in pieces that several processes wrote."""
AVERAGE = "average."
"""`average.NAME`: the moving average of a parameter, where the task has `ema`."""
OPTIMIZER = "optimizer."
"""`optimizer.NAME.KEY`: the optimizer's state `KEY` of the parameter `NAME`."""
LOCAL = "local."
"""`local.SLICE.NAME`: a buffer `NAME` of the processes that train on slice `SLICE` of a batch."""
