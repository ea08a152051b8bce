"""Compiles DeepSpeed's operators for the CPU, where they are not there: `python -m tests.operators`, minutes once."""

import os
from collections.abc import Sequence

OPERATORS = ("CPUAdamBuilder", "AsyncIOBuilder")


def build(names: Sequence[str] = OPERATORS) -> dict[str, bool]:
    """Whether each is there now; they stay in the environment's folder."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from grappe.contrib.deepspeed import library

    return {name: library.builds(name) for name in names}


if __name__ == "__main__":
    for operator, is_there in build().items():
        print(f"DeepSpeed's {operator}: {'there' if is_there else 'cannot be compiled here'}")
