"""%%grappe: what a cell's line becomes, and in a real kernel: curves, the stop button, one message, a job's script."""

import re
from pathlib import Path

import pytest
from docs import translations

import grappe
from grappe.contrib.jupyter import COMMANDS, HEADER, command_of
from grappe.errors import UsageError
from tests.test_notebook import ROOT, Kernel, kernel, pictures, text  # noqa: F401 - a fixture

CELL = "from grappe.tasks.digits import Digits\n\n\nclass Wide(Digits):\n    width: int = 3\n"
PLAN = "replicate=2,device=cpu,threads=1,workers=0"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train", "train FILE"),
        ("train replicate=2 epochs=3", "train FILE epochs=3 --plan replicate=2"),
        (
            "train replicate=2,compile lr=0.2 precision=bf16",
            "train FILE lr=0.2 --plan replicate=2,compile,precision=bf16",
        ),
        ("train lr=0.2 lr=0.3", "train FILE lr=0.2 lr=0.3"),
        ("train compile --run a --steps 2", "train FILE --run a --steps 2 --plan compile"),
        ("train ddp", "train FILE --plan ddp"),
        ("train one", "train FILE --plan one"),
        ("train threads=2 --plan replicate=2", "train FILE threads=2 --plan replicate=2"),
        ("train replicte=2", "train FILE replicte=2"),
        ("verify replicate=2 --steps 2", "verify FILE --steps 2 --plan replicate=2"),
        ("foresee --site narval", "foresee FILE --site narval"),
        ("submit --site narval --time 1h", "submit --site narval --time 1h -- train FILE"),
        ("submit replicate=2 lr=1 --gpus 2", "submit --gpus 2 -- train FILE lr=1 --plan replicate=2"),
        ("submit --gpus 2 -- train replicate=2 --run a", "submit --gpus 2 -- train FILE --run a --plan replicate=2"),
        ("submit --gpus 2 -- verify --plan replicate=2", "submit --gpus 2 -- verify FILE --plan replicate=2"),
    ],
)
def test_a_line_is_the_terminals_command(line: str, words: str, here: Path) -> None:
    command = " ".join(command_of(line, CELL))
    (file,) = here.iterdir()
    assert command == words.replace("FILE", file.name)
    assert file.name.startswith("wide_") and file.read_text() == HEADER + CELL
    assert " ".join(command_of(line, CELL)) == command
    assert [*here.iterdir()] == [file]
    command_of(line, CELL.replace("3", "4"))
    assert len([*here.iterdir()]) == 2


@pytest.mark.parametrize(
    ("line", "cell", "says"),
    [
        ("", CELL, "%%grappe takes train, verify, foresee or submit first"),
        ("--run a", CELL, "%%grappe takes train, verify, foresee or submit first"),
        ("train 'a", CELL, "No closing quotation"),
        ("runs", CELL, "For others: !grappe runs"),
        ("submit -- launch a.py", CELL, "For others: !grappe launch"),
        ("submit -- --plan replicate=2", CELL, "takes train, verify, foresee or submit first"),
        ("train", "%matplotlib inline\n" + CELL, "line 2 of the cell: invalid syntax"),
        (
            "train workers=2",
            CELL.replace("width", "workers"),
            "workers is a key of plans and a field of the cell's task",
        ),
    ],
)
def test_what_a_cell_cannot_be_is_refused(line: str, cell: str, says: str, here: Path) -> None:
    with pytest.raises(UsageError, match=says):
        command_of(line, cell)
    assert not [*here.iterdir()]


def test_an_edited_file_is_not_written_over(here: Path) -> None:
    file = Path(command_of("train", CELL)[1])
    file.write_text("mine")
    with pytest.raises(UsageError, match=rf"{file} was edited since"):
        command_of("train", CELL)
    assert file.read_text() == "mine"


@pytest.mark.slow
def test_a_cell_trains_with_its_curves(kernel: Kernel) -> None:  # noqa: F811
    assert kernel.execute("%load_ext grappe.contrib.jupyter") == []
    messages = kernel.execute(f"%%grappe train {PLAN} epochs=2 --run magic\n{CELL}")
    assert "polyline" in pictures(messages)[-1]
    assert "on 2 processes" in text(messages) and "validation accuracy" in text(messages)
    assert "\r" not in text(messages)
    assert grappe.Run(kernel.folder / "magic").is_finished()
    [(_, result)] = kernel.execute("print(type(grappe.load('magic')).__name__)")
    assert result["text"] == "LeNet\n"
    messages = kernel.execute(f"%%grappe verify {PLAN} --steps 2\n{CELL}")
    assert "same" in text(messages)


@pytest.mark.slow
def test_the_stop_button_saves_and_the_cell_resumes(kernel: Kernel) -> None:  # noqa: F811
    kernel.execute("%load_ext grappe.contrib.jupyter")
    stopped, cell = [], "from tests.slow import Slow\n\n\nclass Slower(Slow):\n    pause: float = 0.2\n"

    def stop(kind: str) -> None:
        if kind == "update_display_data" and not stopped:
            stopped.append(kind)
            kernel.manager.interrupt_kernel()

    messages = kernel.execute(f"%%grappe train {PLAN} epochs=300 --run stopped-magic\n{cell}", stop)
    assert "interrupted, saved" in text(messages) and not [kind for kind, _ in messages if kind == "error"]
    checkpoint = grappe.Run(kernel.folder / "stopped-magic").latest()
    assert checkpoint is not None and checkpoint.step > 0
    steps = checkpoint.step + 2
    messages = kernel.execute(f"%%grappe train {PLAN} epochs=300 --run stopped-magic --steps {steps}\n{cell}")
    assert f"{steps} steps" in text(messages)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "cell", "says"),
    [
        ("train replicte=2", CELL, "grappe: task Wide has no 'replicte'"),
        ("train --plan replicte=2", CELL, "grappe: plan has no 'replicte': did you mean replicate"),
        ("train", "x = 1\n", "there is no class in it that derives from grappe.Task"),
        ("train --rnu a", CELL, "grappe: there is no option --rnu"),
        ("train", CELL.replace("width: int = 3", "width: int = nn"), ", line 6, in Wide(): width: int = nn)"),
        ("submit --site narval --time 1h", CELL, "grappe: narval needs an account: --account NAME"),
    ],
)
def test_an_error_is_one_message(kernel: Kernel, line: str, cell: str, says: str) -> None:  # noqa: F811
    kernel.execute("%load_ext grappe.contrib.jupyter")
    messages = kernel.execute(f"%%grappe {line}\n{cell}")
    kind, content = messages[-1]
    assert kind == "error" and len(content["traceback"]) == 1
    assert says in content["traceback"][0] and "Traceback" not in content["traceback"][0]


@pytest.mark.slow
def test_a_cell_becomes_a_job(kernel: Kernel) -> None:  # noqa: F811
    kernel.execute("%load_ext grappe.contrib.jupyter")
    line = "submit --site narval --account def-prof --time 1h --dry-run -- train replicate=2"
    words = text(kernel.execute(f"%%grappe {line}\n{CELL}"))
    (file,) = [file.name for file in kernel.folder.glob("wide_*.py") if "= 3" in file.read_text()]
    assert "#SBATCH --gpus-per-node=a100:2\n" in words and f"grappe train {file} --plan replicate=2" in words


@pytest.mark.slow
def test_the_pages_cells_run(kernel: Kernel) -> None:  # noqa: F811
    page = (ROOT / "docs" / "jupyter.md").read_text()
    load, train = [block.split("\n", 1)[1].rpartition("\n")[0] for block in translations.blocks(page)]
    kernel.execute(load)
    messages = kernel.execute(train)
    assert "finished, 69 steps" in text(messages)
    lines = re.findall(r"^\| `%%grappe (.*?)` \|", page, re.MULTILINE)
    assert [line.split()[0] for line in lines] == [*COMMANDS, "submit"]
    [file] = re.findall(r"wide_\w+\.py", page)
    assert (kernel.folder / file).is_file()
