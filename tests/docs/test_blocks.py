"""Every code block of every guide, in both languages: run, its commands parsed, or named here with why not.

Commands are parsed, not run: most of them train for minutes, and the tests of their verbs run them on less.
"""

import re
import shlex
from pathlib import Path

import pytest
from docs import translations

from grappe.cli.commands import app
from tests.docs.test_pieces import COMPLETE, HERE, first, opened

ROOT = translations.ROOT
LISTS = (
    "accuracy.md",
    "api.md",
    "benchmarks.md",
    "bottlenecks.md",
    "gallery-parity.md",
    "gpu-evidence.md",
    "json.md",
    "log.md",
    "memory-of-plans.md",
    "soak.md",
    "step.md",
)
"""Pages of names, of figures or for developers, which are no guides, and stay English."""
GUIDES = [ROOT / "README.md", *(one for one in sorted((ROOT / "docs").glob("*.md")) if one.name not in LISTS)]
PAGES = [*GUIDES, *sorted(translations.FRENCH.glob("*.md"))]

RUN_ELSEWHERE = {
    "README.md": "tests/test_readme.py",
    "augmentation.md": "tests/test_imagenet_guide.py",
    "corpus.md": "tests/test_data_guide.py",
    "data.md": "tests/test_data_guide.py",
    "data-formats.md": "tests/test_data_formats.py",
    "from-a-script.md": "tests/docs/test_from_a_script.py",
    "notebook.md": "tests/test_notebook.py",
    "optimizers.md": "tests/optimizers/test_guide.py",
    "transformers.md": "tests/test_transformers_guide.py",
    "watchers.md": "tests/test_readme.py",
}
"""Guides whose Python blocks a test of their own runs."""

NOT_RUN = {
    ("task.md", COMPLETE): "tests/docs/test_newcomer.py trains it",
    ("task.md", "# make_digits.py"): "tests/docs/test_newcomer.py runs it",
    ("too-big.md", "def domain(self"): "a part of a task; tests/parity/test_domain.py cuts another dimension",
    ("own-loop.md", "import grappe"): "a part of examples/gan.py; tests/training/test_own_loop.py trains such a loop",
    ("own-loop.md", "grappe launch --plan"): "a script of the reader's; tests/verbs/test_launch.py launches such a one",
    ("slurm.md", "import grappe.slurm"): "needs a cluster; tests/docs/test_pieces.py holds its calls to signatures",
    (
        "task.md",
        "def model(self):\n    student = network()",
    ): "a part; tests/engines/shared/test_after_step.py trains it",
    ("lightning.md", "#SBATCH --nodes=2"): "a job script of the reader's",
    ("data.md", "srun --ntasks-per-node=1"): "a line of a job script of the reader's",
    ("export.md", "module load"): "needs a cluster's modules; tests/verbs/export runs the cmake lines",
    ("export.md", "ldd "): "needs a torch for GPUs; it is the page's line",
    ("extension.md", "module load"): "needs a cluster's modules; tests/extension runs the pip line",
}
OUTPUT = {
    ("data.md", "data  with infinitely fast data"),
    ("deepspeed.md", "engine           DeepSpeed"),
    ("deepspeed.md", "config=ds_config.json does not fit"),
    ("export.md", '{"class": 0'),
    ("export.md", "sample 0: with the weights"),
    ("foresee.md", "$ grappe submit"),
    ("larger-batch.md", "gradient noise scale: about"),
    ("learning-rate.md", "2.427"),
    ("measure.md", "time             1.8 s"),
    ("measure.md", "one process (batch 64), 20.5 ms"),
    ("predict.md", '{"sample": 0'),
    ("slurm.md", "expected end: "),
    ("too-big.md", "peak memory      966 MB"),
    ("too-big.md", "grappe: out of memory in process 0"),
    ("tune.md", "trial  accuracy"),
}
"""Blocks that show what a command prints."""


def commands(text: str) -> list[str]:
    """The commands of grappe in a block of the shell, without comments; not those that leave words out ("…")."""
    lines = [line.partition("  #")[0].partition(" | head")[0] for line in text.splitlines()]
    found = [line[at.end() :] for line in lines for at in re.finditer(r"^(?:\$ |.* [|&]+ )?(?=grappe )", line)]
    return [one for one in found if "…" not in re.split(r"\s+", one)]


def marked(page: str, text: str) -> bool:
    """Whether the block stands in one of the lists above."""
    return any(page == name and text.lstrip().startswith(start) for name, start in [*NOT_RUN, *OUTPUT])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_is_run_parsed_or_marked(page: Path) -> None:
    for block in translations.blocks(page.read_text()):
        language, text = opened(block)
        known = commands(text)
        for command in known:
            app.parse_args(shlex.split(command)[1:], exit_on_error=False, print_error=False)
        if page.parent == translations.FRENCH:
            continue  # its code is the English one's: tests/docs/test_translations.py
        runs = (page.name, first(text)) in HERE or (language == "python" and page.name in RUN_ELSEWHERE)
        shell = known or re.search(r"^(grappe .*…|make |pip install )", text, re.MULTILINE)
        assert runs or marked(page.name, text) or (not language and shell), (
            f"{page.name}: no test runs this block. Run it in a test, or name it with its reason in {__file__}:\n{text}"
        )


@pytest.mark.parametrize(("guide", "test"), RUN_ELSEWHERE.items())
def test_the_named_test_reads_the_guide(guide: str, test: str) -> None:
    assert guide in (ROOT / test).read_text()


@pytest.mark.parametrize(("guide", "start"), [*NOT_RUN, *sorted(OUTPUT)])
def test_nothing_is_marked_that_is_gone(guide: str, start: str) -> None:
    texts = [opened(block)[1].lstrip() for block in translations.blocks((ROOT / "docs" / guide).read_text())]
    assert any(text.startswith(start) for text in texts)
