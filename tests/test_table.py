"""Tables: HTML that escapes foreign text, DataFrames, and the same without pandas."""

import math
import sys

import pytest

from grappe.table import Table, frame

HOSTILE = "<script>alert(1)</script>\x1b[31m"


def test_text_is_escaped_and_long_tables_are_cut() -> None:
    for rows in ([{HOSTILE: HOSTILE}], [{HOSTILE: HOSTILE}] * 2):
        html = Table(rows)._repr_html_()
        assert "<script" not in html and "\x1b" not in html
        assert html.count("&lt;script&gt;alert(1)") == len(rows) + 1
    rows = Table({"step": step, "loss": 1 / step} for step in range(1, 1001))
    html = rows._repr_html_()
    assert html.count("<tr>") == 22 and "… 980 more" in html and "0.5000" in html
    assert "\x1b" not in repr(Table([{HOSTILE: 1}]))


def test_columns_without_pandas_are_those_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"step": 1, "loss": 0.5}, {"step": 2, "accuracy": math.nan}]
    with_pandas = frame(rows)
    monkeypatch.setitem(sys.modules, "pandas", None)  # as if it were not installed
    without = frame(rows)
    assert isinstance(without, Table)
    assert list(without) == list(with_pandas) == ["step", "loss", "accuracy"]
    assert len(without) == len(with_pandas) == 2
    assert without["step"] == list(with_pandas["step"]) == [1, 2]
    assert without["loss"] == [0.5, None]
    with pytest.raises(KeyError, match="los"):
        without["los"]
    with pytest.raises(ImportError):
        without.to_pandas()
