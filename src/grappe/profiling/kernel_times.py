"""Times kernels on a GPU by torch's profiler, for an operator trace."""

from __future__ import annotations

from typing import Any

import torch

from grappe.profiling.operators import LABEL


class KernelTimes:
    """A profiler that runs beside an operator trace; gives the seconds of each traced call's kernels."""

    def __init__(self) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self._profiler = torch.profiler.profile(activities=kinds)

    def start(self) -> None:
        """Begins to record."""
        torch.cuda.synchronize()
        self._profiler.__enter__()

    def stop(self) -> None:
        """Ends the recording, once the GPU has finished."""
        torch.cuda.synchronize()
        self._profiler.__exit__(None, None, None)

    def seconds(self) -> dict[int, float]:
        """Returns the seconds of kernels by the number of the call that started them."""
        return by_call(self._profiler.events())


def by_call(events: Any) -> dict[int, float]:
    """Sums kernels' seconds by number of call. A label has the kernels of all that was called inside it."""
    found: dict[int, float] = {}
    for event in events:
        # The same label is on the GPU's own timeline once more.
        if event.name.startswith(LABEL) and event.device_type == torch.autograd.DeviceType.CPU:
            number = int(event.name.removeprefix(LABEL))
            found[number] = found.get(number, 0.0) + event.device_time_total / 1e6
    return found
