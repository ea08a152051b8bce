"""The names that `import grappe` promises are there, and are what they are called."""

from __future__ import annotations

import inspect

import pytest

import grappe


@pytest.mark.parametrize("name", grappe.__all__)
def test_a_public_name_is_a_class_or_a_function(name: str) -> None:
    found = getattr(grappe, name)
    assert inspect.isclass(found) or inspect.isfunction(found)
    assert found.__doc__
