"""Private names of torch's compiler, Inductor: packages made ahead of time, CUDA graphs that were not recorded."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grappe.private_api import PrivateName

SEEN = "2.11 to 2.13"
USED = (PrivateName("torch", "_inductor", SEEN), PrivateName("torch", "_dynamo", "2.8 to 2.13"))


def compile_package(program: Any, file: Path, options: dict[str, Any], scratch: Path) -> None:
    """Compiles a torch.export.ExportedProgram to the package `file`, .pt2; the compiler's files are in `scratch`."""
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.utils import fresh_cache

    with quiet(), fresh_cache(dir=str(scratch)):
        aoti_compile_and_package(program, package_path=str(file), inductor_configs=dict(options))


def compiles_for_others() -> bool:
    """Returns whether this torch can compile for another processor than this one: 2.11 cannot, 2.13 can."""
    import torch._inductor.config

    return hasattr(torch._inductor.config.cpp, "march")


def load_package(file: Path) -> Callable[..., Any]:
    """Loads a package, a function of the program's leaves, which is native code: the caller must trust its origin."""
    from torch._inductor import aoti_load_package

    with quiet():
        return aoti_load_package(str(file))


def graphs_left_out() -> int:
    """Counts the compiled functions of this process that run without the CUDA graph that was asked for."""
    from torch._dynamo.utils import counters

    return counters["inductor"]["cudagraph_skips"]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps torch's compiler from logging its graphs and deprecations on standard error."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
