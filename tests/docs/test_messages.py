"""The catalogue of French messages: what is extracted from the sources, and how mistakes in it are found."""

import textwrap
from pathlib import Path

import pytest
from babel.messages.catalog import Catalog
from docs.messages.__main__ import check
from docs.messages.catalogue import mistakes, mo, po, renewed
from docs.messages.flow import Program
from docs.messages.others import help_texts

from grappe.language import catalogue_of
from grappe.language.catalogue import Template
from grappe.private_api.gettext import messages_of

COMPILED = Path(__file__).parents[2] / "src" / "grappe" / "language" / "fr.mo"


def extracted(tmp_path: Path, source: str) -> set[str]:
    """The templates of a package of one file."""
    package = tmp_path / "grappe"
    package.mkdir()
    (package / "some.py").write_text(textwrap.dedent(source))
    return set(Program(package).found)


def test_what_is_raised_is_found_with_its_parts(tmp_path: Path) -> None:
    found = extracted(
        tmp_path,
        '''
        USAGE = "give a RUN folder"

        def nearest(names):
            """No message, as this is a docstring."""
            if names:
                return f"did you mean {' or '.join(names)}?"
            return "there is none"

        def open_run(run, count):
            """Another docstring of a function."""
            reason = "it is damaged" if count else "it is not there"
            if not run:
                raise UsageError(f"which run? {USAGE}")
            if run == "a b c":
                raise UsageError(f"no run {run!r}: {nearest(run)}")
            log("this is said to nobody")
            raise RunError(
                f"{run.folder}: {count:,} checkpoint{'s' if count != 1 else ''} of {len(run)}, "
                + reason
            )
        ''',
    )
    assert found == {
        "which run? give a RUN folder",
        "no run {run}: {nearest}",
        "did you mean {names}?",
        "there is none",
        "{folder}: {count} checkpoints of {run}, {reason}",
        "{folder}: {count} checkpoint of {run}, {reason}",
        "it is damaged",
        "it is not there",
    }


def test_parameters_and_attributes_are_followed(tmp_path: Path) -> None:
    found = extracted(
        tmp_path,
        """
        def refuse(what):
            raise PlanError(f"the plan {what}")

        class Check:
            def say(self):
                refuse(self.reason)

            def look(self):
                self.reason = "has no step left"
                yield Verdict(reason=f"has {self.count} steps too many {{…}}")
        """,
    )
    assert found == {"the plan {what}", "has no step left", "has {count} steps too many {{…}}"}


@pytest.fixture
def small() -> Catalog:
    made = Catalog(locale="fr")
    made.add("no run {name}", "pas d'exécution {name}")
    made.add("it is damaged", "il est endommagé")
    return made


TEMPLATES = {"no run {name}": {"a.py"}, "it is damaged": {"a.py"}}


@pytest.mark.parametrize(
    ("translation", "mistake"),
    [
        ("pas d'exécution {nom}", "its placeholders are ['nom'], not ['name']"),
        ("pas d'exécution", "its placeholders are [], not ['name']"),
        ("pas d'exécution {name} {other}", "its placeholders are ['name', 'other']"),
        ("pas d'exécution {name", "its braces do not fit"),
        ("pas d'exécution {name} }", "its braces do not fit"),
        (" pas d'exécution {name}", "it begins or ends with other spaces"),
        ("pas d'exécution\u00a0{name}", "characters that terminals are not sent"),
        ("\x1b[31mpas d'exécution {name}", "characters that terminals are not sent"),
        ("", "untranslated"),
    ],
)
def test_a_planted_mistake_is_found(translation: str, mistake: str, small: Catalog) -> None:
    small.get("no run {name}").string = translation
    (found,) = set(mistakes(small, TEMPLATES))
    assert mistake in found


def test_what_is_new_stale_or_unsure_is_found(small: Catalog) -> None:
    assert mistakes(small, {**TEMPLATES, "a new one": {"a.py"}}) == ["untranslated: 'a new one'"]
    assert mistakes(small, {"it is damaged": {"a.py"}}) == ["stale, no such message any more: 'no run {name}'"]
    small.get("it is damaged").flags.add("fuzzy")
    assert mistakes(small, TEMPLATES) == ["fuzzy, compare and remove the mark: 'it is damaged'"]


def test_a_renamed_placeholder_keeps_its_translation(small: Catalog) -> None:
    small.add("{one} of {two}, {one}", "{one} sur {two}, {one}")
    new = {"no run {folder}": {"a.py"}, "it is damaged": {"a.py"}, "{count} of {total}, {count}": {"a.py"}}
    catalogue = renewed(small, new)
    assert mistakes(catalogue, new) == []
    assert catalogue.get("no run {folder}").string == "pas d'exécution {folder}"
    assert catalogue.get("{count} of {total}, {count}").string == "{count} sur {total}, {count}"


def test_the_files_are_the_same_whenever_they_are_written(small: Catalog) -> None:
    assert b"POT-Creation-Date" not in po(small)
    assert mo(small) == mo(small)
    assert "il est endommagé".encode() in mo(small)


def test_the_catalogue_is_whole_and_compiled() -> None:
    assert check("fr") == []


def test_each_template_is_found_again() -> None:
    """A message that was made of a template is translated by that template, and by no other that resembles it."""
    french = catalogue_of("fr")
    of_help = help_texts()  # looked up as they are
    for english, other in messages_of(COMPILED).items():
        template = Template(english, other)
        names = {name: f"v{number}" for number, name in enumerate(template.names)}
        values = [names[name] for name in template.names]
        if english.strip() and english != " or " and english not in of_help:
            message = "".join(a + b for a, b in zip(template.texts, [*values, ""], strict=True))
            assert french.message(message) == template.filled(values)
