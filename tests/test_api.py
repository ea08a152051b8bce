"""Public names: the reference lists each of them once, and nothing that cannot be imported."""

import re

import pytest
from docs import api

import grappe
import grappe.data
import grappe.data.augment
import grappe.optimizers
import grappe.slurm
from grappe.plan import as_plan
from grappe.training.task_reference import TaskReference

MODULES = (grappe, grappe.data, grappe.data.augment, grappe.optimizers, grappe.slurm)


def test_the_reference_lists_what_each_module_says_is_public() -> None:
    listed = re.findall(r"^### `(grappe[\w.]*)`", api.page(), re.MULTILINE)
    assert listed == [f"{module.__name__}.{name}" for module in MODULES for name in sorted(module.__all__)]


def test_every_public_name_is_a_class_or_a_function_with_a_docstring() -> None:
    names = [(module, name) for module in MODULES for name in module.__all__]
    faults = [
        f"{module.__name__}.{name}"
        for module, name in names
        if not callable(getattr(module, name)) or not getattr(module, name).__doc__
    ]
    assert not faults, "\n".join(faults)


def test_a_notebook_completes_the_public_names() -> None:
    assert set(dir(grappe)) == {*grappe.__all__, "__version__", "data", "optimizers", "slurm"}


def test_fields_are_values_or_texts() -> None:
    class Mine(grappe.Task):
        width: int = 3
        deep: bool = False

    for values in ({"width": 8, "deep": True}, {"width": "8", "deep": "true"}):
        assert TaskReference.of("digits", values).texts == {"width": "8", "deep": "true"}
        assert TaskReference.of(Mine, values).value == Mine(width=8, deep=True)
        assert TaskReference.of(Mine(width=4), values).value == Mine(width=8, deep=True)
    with pytest.raises(grappe.GrappeError, match="is neither a number nor a text"):
        TaskReference.of("digits", {"width": [8]})
    with pytest.raises(grappe.GrappeError, match="has no 'widht': did you mean width"):
        TaskReference.of(Mine(), {"widht": 8})


def test_a_plan_is_a_text_or_its_keys() -> None:
    plan = {"replicate": 2, "recompute": True, "offload": "cpu", "shard": 2}
    assert as_plan(plan) == as_plan("replicate=2,recompute,offload=cpu,shard=2")
    with pytest.raises(grappe.GrappeError, match=r'2 is not a plan: write "replicate=2"'):
        as_plan(2)  # type: ignore[arg-type]
