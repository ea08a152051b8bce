"""Assembles the Markdown sources of the site: the repository's pages, and pages made from the code."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from docs import translations
from docs.site import notebooks, reference
from docs.site.links import FRENCH, ROOT, front_matter, rewrite, site_page

IMAGE = re.compile(r"!\[[^\]]*\]\(([^():\s]+)\)")
OTHERS = re.compile(r"\A---\n.*?^---\n+", re.DOTALL | re.MULTILINE)
"""The front matter that a page has for other programs, as an agent's skill."""
LEXERS = {".py": "python", ".toml": "toml", ".cpp": "cpp", ".json": "json", ".sh": "bash"}
BOTH = ("commands/", "plan/", "labs/")
"""Pages that both languages have under the same name."""
NAVIGATION = (
    ("Start", "Débuter", ("guides", "launch", "environment", "offline", "notebook")),
    ("Slurm", "Slurm", ("slurm", "several-nodes", "resume", "tune", "another-cluster")),
    (
        "Speed, memory and cost",
        "Vitesse, mémoire et coût",
        ("foresee", "which-gpu", "measure", "feed-gpu", "scaling", "energy"),
    ),
    ("Results", "Résultats", ("verify", "track", "fine-tune", "agent")),
    ("Concepts", "Notions", ("concepts", "tour", "task", "plans")),
    ("Labs", "Travaux pratiques (en anglais)", ()),
    ("Reference", "Référence", ()),
    ("Scripts", "Scripts", ("own-loop", "from-a-script", "from-a-page", "transformers", "watchers")),
    ("Tasks", "Tâches", ("gallery", "augmentation", "optimizers", "learning-rate", "larger-batch")),
    ("Data", "Données", ("data", "corpus", "data-formats", "imagenet")),
    ("Plans", "Plans", ("too-big", "lightning", "deepspeed", "horovod", "slurm-python", "jupyter")),
    ("Trained models", "Modèles entraînés", ("predict", "export", "extension")),
    ("How it works", "Fonctionnement", ("step", "parity", "promises", "gpu", "security")),
    (
        "Evidence",
        "Preuves",
        ("gallery-parity", "accuracy", "memory-of-plans", "bottlenecks", "gpu-evidence", "soak", "benchmarks"),
    ),
    ("Project", "Projet", ("log",)),
)
"""The groups of the sidebar: title, French title, guides in their order. Labs and reference pages are found."""
REFERENCE = ("commands/index", "plan/index", "docs/api", "docs/json", "sites/index", "errors")
ENTRIES = {
    "en": (
        ("launch", "Your own script", "As it is, on several processes"),
        ("task", "Your own task", "Model, data and loss in twenty lines"),
        ("plans", "Choose a plan", "DDP, FSDP, ZeRO, pipelines: by what you have"),
        ("slurm", "Slurm cluster", "Put one line before the command that works here"),
        ("verify", "Same result?", "Check a plan on your own task"),
    ),
    "fr": (
        ("launch", "Votre script", "Tel quel, sur plusieurs processus"),
        ("task", "Votre tâche", "Modèle, données et perte en vingt lignes"),
        ("plans", "Choisir un plan", "DDP, FSDP, ZeRO, pipelines : selon ce que vous avez"),
        ("slurm", "Grappe Slurm", "Une ligne devant la commande qui fonctionne ici"),
        ("verify", "Même résultat\N{NO-BREAK SPACE}?", "Vérifier un plan sur votre tâche"),
    ),
}
"""The entries of the first page: guide, title and text."""
PROJECT = (
    "skills/grappe/SKILL",
    "docs/decisions/index",
    "CHANGELOG",
    "CONTRIBUTING",
    "benchmarks/README",
    "packaging/ondemand/README",
)
UNSEARCHED = (
    *("CHANGELOG", "docs/decisions/", "docs/log", "benchmarks/"),
    *(
        "docs/accuracy",
        "docs/bottlenecks",
        "docs/gallery-parity",
        "docs/gpu-evidence",
        "docs/memory-of-plans",
        "docs/soak",
    ),
)
"""Pages that the search leaves out, as it does those that the sidebar does not list: guides and keys come first."""


def assemble(language: str, folder: Path) -> None:
    """Writes Sphinx's source tree of one language into `folder`."""
    translated = sorted((ROOT / FRENCH).glob("*.md"))
    if language == "en":
        pages = _english(folder)
        pairs = {site_page(f"docs/{one.name}"): site_page(f"{FRENCH}{one.name}") for one in translated}
        pairs["index"] = "fr/index"
        pairs |= {page: f"fr/{page}" for page in pages if page.startswith(BOTH) and page != "labs/index"}
    else:
        pages = _french(folder, translated)
        pairs = {one.stem: f"docs/{one.stem}" for one in translated}
        pairs["index"] = "index"
        pairs |= {page: page for page in pages if page.startswith(BOTH)}
    readme = (folder / "index.md").read_text()
    (folder / "index.md").write_text(_landing(language, readme) + _contents(language, pages))
    shown = {page: f"{other}.html" for page, other in pairs.items()}
    (folder / "translations.json").write_text(json.dumps(shown))


def _landing(language: str, readme: str) -> str:
    """The README as the first page: the link to the other language is in the sidebar, five entries follow the claim."""
    readme = re.sub(r"^\*(?:\[|<a ).*\*\n\n", "", readme, count=1, flags=re.MULTILINE)
    under = "docs/" if language == "en" else ""
    links = [f'<a href="{under}{page}.html"><b>{title}</b> {text}</a>' for page, title, text in ENTRIES[language]]
    entries = "\n".join(["```{raw} html", '<nav class="entries">', *links, "</nav>", "```"])
    return re.sub(r"^\*\*.+\*\*\n", lambda claim: f"{claim[0]}\n{entries}\n", readme, count=1, flags=re.MULTILINE)


def _english(folder: Path) -> set[str]:
    """Copies all pages, those that they link to, and what is made from the code; returns their names."""
    waiting = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "docs/decisions"]
    waiting += [f"docs/{one.name}" for one in sorted((ROOT / "docs").glob("*.md")) if one.name != "api.md"]
    waiting += _labs()
    made = reference.pages()
    for path, text in made.items():
        _write(folder / path, text)
    seen: set[str] = {"docs/api.md"}
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)

        def target(there: str, path: str = path) -> str:
            if there.startswith(FRENCH):
                return _relative(site_page(there), site_page(path)) + ".html"
            waiting.append(there)
            return _relative(site_page(there), site_page(path)) + ".md"

        _copy(path, folder, site_page(path), target)
    return {site_page(path) for path in made} | {site_page(path) for path in seen}


def _french(folder: Path, translated: list[Path]) -> set[str]:
    """Copies the French guides, the commands and the labs; what has no translation is linked to on the English site."""
    made = reference.french_pages()
    for path, text in made.items():
        _write(folder / path, text)
    for file in translated:
        page = site_page(f"{FRENCH}{file.name}").removeprefix("fr/")

        def target(there: str) -> str:
            if there.startswith(FRENCH):
                return site_page(there).removeprefix("fr/") + ".md"
            return f"../{site_page(there)}.html"

        _copy(f"{FRENCH}{file.name}", folder, page, target)
    for path in _labs():

        def beside(there: str) -> str:
            guide = site_page(f"{FRENCH}{PurePosixPath(there).name}").removeprefix("fr/")
            if there.startswith("docs/") and (ROOT / FRENCH / f"{guide}.md").exists():
                return f"../{guide}.md"
            return f"../../{site_page(there)}.html"

        _copy(path, folder, site_page(path), beside)
    return {file.stem for file in translated} | {site_page(path) for path in (*made, *_labs())}


def _labs() -> list[str]:
    return [str(one.relative_to(ROOT)) for one in sorted((ROOT / "labs").glob("*.ipynb"))]


def _copy(path: str, folder: Path, page: str, target: Callable[[str], str]) -> None:
    """Writes the page of a file or folder of the repository, with its images."""
    file = ROOT / path
    if file.is_dir():
        text = rewrite(_listing(file), f"{path}/index.md", target)
    elif file.suffix == ".md":
        text = rewrite(_noted(file), path, target)
        for image in IMAGE.findall(text):
            copy = folder / PurePosixPath(page).parent / image
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file.parent / image, copy)
    elif file.suffix == ".ipynb":
        text = rewrite(notebooks.markdown(file), path, target)
    else:
        fence = "`" * 12
        text = f"# {path}\n\n{fence}{LEXERS.get(file.suffix, 'text')}\n"
        text += f"{file.read_text()}{fence}\n"
    listed = path == "docs/decisions" or path.startswith("labs/")
    listed = listed or (file.suffix == ".md" and not path.startswith(("docs/decisions/", "tests/")))
    searched = listed and not page.startswith(UNSEARCHED)
    _write(folder / f"{page}.md", front_matter(listed=listed, searched=searched, source=path) + text)


def _noted(file: Path) -> str:
    """A page's text; in a French one whose English one has changed since, this is said under the title."""
    text = OTHERS.sub("", translations.MARK.sub("", file.read_text()))
    behind = [one for one in translations.guides() if one.french == file and not one.is_current]
    if not behind:
        return text
    address = os.path.relpath(behind[0].english, file.parent)
    title, _, rest = text.partition("\n")
    return f"{title}\n\n> La [page anglaise]({address}) a changé depuis cette traduction.\n{rest}"


def _listing(folder: Path) -> str:
    """A folder's page: each file with its first line; pages, notebooks and tasks as links."""
    lines = [f"# {folder.relative_to(ROOT)}", ""]
    for file in sorted(folder.iterdir()):
        if file.suffix == ".md":
            lines.append(f"- [{file.read_text().partition(chr(10))[0].lstrip('# ')}]({file.name})")
        elif file.suffix == ".py":
            says = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
            name = f"[`{file.name}`]({file.name})" if "examples" in folder.parts else f"`{file.name}`"
            lines.append(f"- {name}: {says}" if says else f"- {name}")
        elif file.suffix == ".ipynb":
            title = notebooks.markdown(file).partition("\n")[0].removeprefix("# ")
            lines.append(f"- [{title or file.name}]({file.name})")
        elif file.is_file() and file.suffix:
            lines.append(f"- `{file.name}`")
    return "\n".join(lines) + "\n"


def _contents(language: str, pages: set[str]) -> str:
    """Returns the table of contents, which the sidebar shows.

    Raises:
        ValueError: a guide is in no group.
    """
    under = "docs/" if language == "en" else ""
    listed = {name for _, _, names in NAVIGATION for name in names}
    if lost := {file.stem for file in (ROOT / "docs").glob("*.md")} - listed - {"api", "json"}:
        raise ValueError(f"docs/site/assemble.py: NAVIGATION does not list {', '.join(sorted(lost))}")
    parts = [""]
    for english, french, names in NAVIGATION:
        group = [f"{under}{name}" for name in names]
        if english == "Labs":
            group = sorted(page for page in pages if page.startswith("labs/") and page != "labs/index")
        elif english == "Reference":
            group = [page for page in REFERENCE if page != "docs/json" or language == "en"]  # it is in English
        elif english == "Project" and language == "en":
            group += PROJECT
        group = [page for page in group if page in pages]
        caption = english if language == "en" else french
        if group:  # the French site has no page of the English evidence
            parts.append("\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *group, "```", ""]))
    return "\n".join(parts)


def jobs() -> list[str]:
    """Returns the pages of the jobs, as docs/guides.md lists them before its concepts."""
    listed = (ROOT / "docs" / "guides.md").read_text().partition("\n## Concepts")[0]
    return re.findall(r"^- \[[^\]]+\]\(([\w-]+)\.md\)", listed, re.MULTILINE)


def scorer() -> str:
    """Returns the script by which the search orders what it finds, with the pages of jobs."""
    return f"const JOBS = {json.dumps(jobs())};\n{(Path(__file__).parent / 'scorer.js').read_text()}"


def llms() -> str:
    """Returns llms.txt, the list of guides that agents read: title, page and first sentence of each."""
    readme = (ROOT / "README.md").read_text()
    claim = re.search(r"^\*\*(.+)\*\*$", readme, re.MULTILINE)
    lines = ["# grappe", "", f"> {claim[1] if claim else ''}"]
    for caption, _, names in NAVIGATION:
        lines += ["", f"## {caption}", ""] if names else []
        for name in names:
            title, _, rest = (ROOT / "docs" / f"{name}.md").read_text().partition("\n")
            text = translations.BLOCK.sub("", rest)
            first = re.search(r"^(?![|#<>*!-])\S.*?(?:\.(?=\s)|:$|\n\n)", text, re.MULTILINE | re.DOTALL)
            words = f": {' '.join(first[0].split()).rstrip(':')}" if first else ""
            lines.append(f"- [{title.lstrip('# ')}](docs/{name}.html){words}")
    return "\n".join([*lines, ""])


def _relative(page: str, start: str) -> str:
    return os.path.relpath(page, PurePosixPath(start).parent)


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
