"""Makes the site's reference pages from the code: commands, keys of a plan, public names, sites, remedies."""

from __future__ import annotations

import dataclasses
import html
import importlib
import io
import re
import tomllib
import typing
from pathlib import Path

from docs import api
from docs.messages.others import command, commands
from docs.site.links import front_matter
from rich.console import Console

import grappe
from grappe import engines, fields, sites
from grappe.cli.commands import app
from grappe.cli.help import set_formatter
from grappe.errors.remedies import REMEDIES
from grappe.language import catalogue_of
from grappe.plan import Plan
from grappe.verbs.catalogue import described_facts, support

DOCS = Path(__file__).parents[1]
LISTED = ("commands/index.md", "plan/index.md", "docs/api.md", "sites/index.md", "errors.md")
"""Those in the sidebar."""
SHOWN = (
    (r"\((?:\?:)?([^()|]*)(?:\|[^()]*)?\)", r"\1"),  # the first of alternatives
    (r"\\[Ab]|\\Z|\?(?=\W|$)", ""),
    (r"(?:-\?)?\\d\+", "N"),
    (r"\[([A-Z])[a-z]\]", r"\1"),
    (r"(?<=_)\?", ""),
    (r"\s*\.\*\s*", " … "),
    (r"\[\\w\.\]\+", "NAME"),
    (r"\\(.)", r"\1"),
)
"""What of a regular expression is shown otherwise, and how, in this order."""
COMMANDS = {
    "en": ("# Commands", "", "Each command's own help, `grappe COMMAND --help`."),
    "fr": ("# Commandes", "", "L'aide de chaque commande en français, `GRAPPE_LANG=fr grappe COMMAND --help`."),
}
PLAN_KEYS = {
    "en": (
        *("Keys of a plan", "A plan is a text, `replicate=2,precision=bf16`; what is not named has its default."),
        *("in torch", "type", "default", "engines", "all", "the others refuse it", "Take care:"),
    ),
    "fr": (
        "Clés du plan",
        "Un plan est un texte, `replicate=2,precision=bf16` ; ce qui n'est pas nommé a sa valeur par défaut.",
        *("dans torch", "type", "par défaut", "moteurs", "tous", "les autres la refusent", "Attention :"),
    ),
}
MOST_GUIDES = 6  # that a page links to
WIDTH = 92  # of a command's help, in characters


def pages() -> dict[str, str]:
    """Returns each page's text by its path in the site."""
    made = {**_commands("en"), **_plan_keys("en"), **_public_names(), **_sites(), "errors.md": _errors()}
    return {path: _orphan(path, text) for path, text in made.items()}


def french_pages() -> dict[str, str]:
    """Returns the pages of commands and plan keys in French, by their paths in the French part of the site."""
    return {path: _orphan(path, text) for path, text in (_commands("fr") | _plan_keys("fr")).items()}


def _orphan(path: str, text: str) -> str:
    return front_matter(listed=path in LISTED, searched=True) + text


def _commands(language: str) -> dict[str, str]:
    made = {}
    set_formatter(app, language)
    lines = [*COMMANDS[language], ""]
    for words in commands(app):
        name = "-".join(words)
        help_text = _help(words)
        guides = _guides(words) if language == "en" else ""
        shown = f"````{{code-block}} text\n:class: terminal\n\n{help_text}\n````"
        made[f"commands/{name}.md"] = f"# `grappe {' '.join(words)}`\n\n{shown}\n{_options(words, language)}{guides}"
        says = re.search(r"\n\n(.+?)(?:\n\n|\Z)", help_text, re.DOTALL)
        first = " ".join(says[1].split()) if says else ""
        lines.append(f"- [`grappe {' '.join(words)}`]({name}.md): {first}")
    made["commands/index.md"] = "\n".join(lines)
    return made


def _help(words: tuple[str, ...]) -> str:
    written = io.StringIO()
    console = Console(file=written, width=WIDTH, color_system=None, force_terminal=False)
    app.help_print(list(words), console=console)
    return "\n".join(line.rstrip() for line in written.getvalue().strip().splitlines())


def _options(words: tuple[str, ...], language: str) -> str:
    """A heading for each option, to be linked to, and its help."""
    application = command(words)
    if not application.default_command:
        return ""
    kinds = typing.get_type_hints(application.default_command).values()
    groups = [fields.docs(kind) for kind in kinds if dataclasses.is_dataclass(kind)]
    grouped = {name: text for group in groups for name, text in group.items()}
    lines = []
    for argument in application.assemble_argument_collection():
        names = [name for name in argument.names if name.startswith("-")]
        text = argument.parameter.help or grouped.get(argument.keys[-1] if argument.keys else "")
        if names and text:
            said = text if language == "en" else str(catalogue_of(language).message(text))
            lines += [f"### `{names[0]}`", "", html.escape(said, quote=False), ""]
    return "\n".join(["", "## Options", "", *lines]) if lines else ""


def _guides(words: tuple[str, ...]) -> str:
    """The guides that show a command."""
    return _mentions(re.compile(rf"grappe {' '.join(words)}(?![\w-])"))


def _mentions(pattern: re.Pattern[str]) -> str:
    """Links to the guides that mention something most often."""
    found = []
    for file in sorted(DOCS.glob("*.md")):
        text = file.read_text()
        if file.stem not in ("api", "log", "promises", "soak") and (times := len(pattern.findall(text))):
            found.append((times, f"- [{text.partition(chr(10))[0].lstrip('# ')}](../docs/{file.name})"))
    lines = [link for _, link in sorted(found, key=lambda pair: -pair[0])[:MOST_GUIDES]]
    return "\n".join(["", "## Guides that use it", "", *lines, ""]) if lines else ""


def _plan_keys(language: str) -> dict[str, str]:
    """A page for each key of a plan, and their list: its meaning, torch's name, a plan with it, a pitfall."""
    made = {}
    head, about, torch_name, kind, default_name, engines_name, every, refused, pitfall = PLAN_KEYS[language]
    lines = [f"# {head}", "", about, ""]
    kinds = {field.name: api.annotation(field.type) for field in dataclasses.fields(Plan)}
    notes = tomllib.loads((DOCS / "site" / "plan_keys.toml").read_text())
    rows = [("engine", Plan().engine, fields.docs(Plan)["engine"].removesuffix("."), engines.names()), *support()]
    colon = " :" if language == "fr" else ":"
    for key, default, meaning, able in rows:
        text = meaning if language == "en" else str(catalogue_of(language).message(meaning))
        supporting = ", ".join(f"`{name}`" for name in able) + f" ({refused})"
        facts = {
            torch_name: notes[key].get("torch"),
            kind: f"`{kinds[key]}`",
            default_name: f"`{default}`",
            engines_name: every if able == engines.names() else supporting,
        }
        page = [f"# `{key}`", "", f"{text}.", ""]
        page += [f"- {name}{colon} {fact}" for name, fact in facts.items() if fact]
        page += ["", "```", f"--plan {notes[key]['example']}", "```", "", f"**{pitfall}** {notes[key][language]}", ""]
        guides = _mentions(re.compile(rf"`[^`\n]*\b{key}(?:=|`|,)")) if language == "en" else ""
        made[f"plan/{key}.md"] = "\n".join(page) + guides
        lines.append(f"- [`{key}`]({key}.md){colon} {text}")
    made["plan/index.md"] = "\n".join(lines)
    return made


def _public_names() -> dict[str, str]:
    """A page for each public name, and docs/api.md as their list."""
    made = {}
    lines = [api.HEAD, "", f"The commands: {', '.join(f'`{name}`' for name in api.commands())}.", ""]
    for module in (grappe, *map(importlib.import_module, api.MODULES)):
        lines += [f"## {module.__name__}", ""]
        for name in sorted(module.__all__):
            title = f"{module.__name__}.{name}"
            made[f"api/{title}.md"] = _page(api.entry(title, getattr(module, name)))
            lines.append(f"- [`{title}`](../api/{title}.md)")
        lines.append("")
    lines += ["## What functions return", "", "The attributes are public; the classes are not for importing.", ""]
    for place, names in api.RETURNED.items():
        module_name, _, name = place.partition(":")
        cls = getattr(importlib.import_module(module_name), name)
        made[f"api/{name}.md"] = _page(api.entry(name, cls, names, constructor=False))
        lines.append(f"- [`{name}`](../api/{name}.md)")
    made["docs/api.md"] = "\n".join(lines)
    return made


def _page(entry: str) -> str:
    """An entry of docs/api.md as a page of its own: its headings two levels up."""
    return re.sub(r"^##(#+) ", r"\1 ", entry, flags=re.MULTILINE) + "\n"


def _sites() -> dict[str, str]:
    made = {}
    lines = ["# Sites", "", "Each cluster that grappe knows, with the source of each fact: `grappe sites NAME`.", ""]
    for file in sorted(Path(sites.__file__).parent.glob("[a-z]*.toml")):  # others are parts of these
        name = file.stem
        site = sites.find(name)
        rows = ["| fact | value | source |", "|---|---|---|"]
        rows += [f"| `{key}` | {_cell(value)} | {_cell(source)} |" for key, value, source in described_facts(site)]
        made[f"sites/{name}.md"] = f"# {name}\n\n{site.title}\n\n" + "\n".join(rows) + "\n"
        lines.append(f"- [{name}]({name}.md): {site.title}")
    made["sites/index.md"] = "\n".join(lines)
    return made


def _cell(text: str) -> str:
    """Text in a table's cell: addresses as links, other text as it is."""
    escaped = re.sub(r"([|*_$\[\]`\\])", r"\\\1", text)
    return re.sub(r"https?://[^\s,]+", lambda found: f"<{found[0].replace(chr(92), '')}>", escaped)


def _errors() -> str:
    """Each remedy, under what Python or torch says."""
    parts = [
        "# Errors and their remedies",
        "When a task fails, grappe shows your line, the message of Python or torch, and a remedy if it has one. Here "
        "are the messages with their remedies.",
    ]
    for pattern, text in REMEDIES.items():
        message, *others = _readable(pattern)
        parts.append(f"## {_escaped(message)}")
        if others:
            parts.append(f"Also: {', '.join(f'`{other}`' for other in others)}")
        parts.append(f"{_escaped(text)}.")
    return "\n\n".join(parts) + "\n"


def _escaped(text: str) -> str:
    for group in re.findall(r"\\\d", text):
        text = text.replace(group, "…")
    return re.sub(r"([*_<>\[\]])", r"\\\1", text).rstrip("?. ")


def _readable(pattern: str) -> list[str]:
    """A regular expression as messages that it finds: "…" for what may be anything."""
    texts, depth, current = [], 0, ""
    for one in re.split(r"(?<!\\)(\(\?:|\(|\)|\|)", pattern):
        if one == "|" and depth == 0:
            texts.append(current)
            current = ""
            continue
        depth += (one in ("(?:", "(")) - (one == ")")
        current += one
    return [_plain(text) for text in [*texts, current]]


def _plain(text: str) -> str:
    text = text.replace(r"\(", "\1").replace(r"\)", "\2")  # a message's own parentheses, not a group's
    for written, shown in SHOWN:
        text = re.sub(written, shown, text)
    return text.replace("\1", "(").replace("\2", ")").strip(" …")
