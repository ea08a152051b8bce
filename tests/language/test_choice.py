"""The language that is chosen."""

import pytest

from grappe.language import LOCALE, VARIABLE, chosen_language, unknown_language


@pytest.mark.parametrize(
    ("variables", "language"),
    [
        ({}, "en"),
        ({"LANG": "C"}, "en"),
        ({"LANG": "fr_FR.UTF-8"}, "fr"),
        ({"LANG": "fr_CA"}, "fr"),
        ({"LANG": "fr"}, "fr"),
        ({"LANG": "french"}, "fr"),
        ({"LANG": "frr_DE.UTF-8"}, "en"),  # Frisian
        ({"LANG": "de_DE.UTF-8"}, "en"),
        ({"LANG": "fr_FR.UTF-8", "LC_ALL": "C.UTF-8"}, "en"),
        ({"LANG": "fr_FR.UTF-8", "LC_MESSAGES": "en_GB.UTF-8"}, "en"),
        ({"LANG": "en_GB.UTF-8", "LC_MESSAGES": "fr_FR@euro"}, "fr"),
        ({"LANG": "fr_FR.UTF-8", "LC_ALL": ""}, "fr"),
        ({"LANG": "fr_FR.UTF-8", VARIABLE: "en"}, "en"),
        ({"LANG": "en_GB.UTF-8", VARIABLE: "fr"}, "fr"),
        ({VARIABLE: "FR"}, "fr"),
        ({"LANG": "fr_FR.UTF-8", VARIABLE: "klingon"}, "en"),
    ],
)
def test_the_variable_comes_before_the_locale(variables: dict[str, str], language: str, monkeypatch) -> None:
    for name in (VARIABLE, *LOCALE):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert chosen_language() == language


def test_an_unknown_language_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for known in ("en", "fr", "fr_CA.UTF-8", "C", ""):
        monkeypatch.setenv(VARIABLE, known)
        assert unknown_language() is None
    monkeypatch.setenv(VARIABLE, "de")
    assert unknown_language() == "GRAPPE_LANG=de: grappe has en and fr, and takes English"
