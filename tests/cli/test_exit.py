"""Messages of the command at its end."""

from __future__ import annotations

import pytest
from cyclopts import App

from grappe.cli import exit as end


def test_what_nobody_foresaw_is_called_a_bug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The words that all attacks and fuzzers search for."""
    app = App()

    @app.default
    def fails() -> None:
        raise ZeroDivisionError("unforeseen")

    monkeypatch.setattr("sys.argv", ["grappe"])
    with pytest.raises(SystemExit) as ended:
        end.run(app)
    assert ended.value.code == 1
    assert f"ZeroDivisionError: unforeseen ({end.BUG}" in capsys.readouterr().err
