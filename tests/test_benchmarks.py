"""The benchmarks' parts run, and their figures are what they say they are."""

import ast
import multiprocessing
import pickle
import sys
import threading
import time
from pathlib import Path

import pytest
from benchmarks import cifar_files, cifar_script, commands, compute_alone, exported, pages, structure
from benchmarks.contenders.grappe import witness
from benchmarks.edited import lines_changed
from benchmarks.figures import spread
from benchmarks.overhead import rows
from benchmarks.pacer import Block, Pacer
from benchmarks.rotation import Pace, installed, rotate
from benchmarks.sections import Sections

from grappe.data.formats import cifar10_python
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

MILLISECOND = 1e-3


def test_no_module_imports_what_imports_it():
    """Holds for imports in functions and for type checking, too: import-linter looks at rooms alone."""
    graph = structure.imports(structure.modules())
    assert structure.circles(graph) == []
    assert structure.circles(structure.between_rooms(graph)) == []
    sizes = structure.sizes()
    assert sizes["lines of Python in src"] > 10_000
    assert not sizes["names that say nothing"]


def test_a_spread_is_the_median_with_quartiles():
    found = spread([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (found.low, found.median, found.high, found.count) == (2.0, 3.0, 4.0, 5)
    assert found.error == pytest.approx(1.57 * 2 / 5**0.5)
    assert spread([7.0]).text("{:.0f}") == "7 (7 to 7)"


def test_rows_compare_within_a_round_and_take_the_slower_process():
    def blocks(*microseconds: float) -> list[list[Block]]:
        return [[Block(wall=value * 1e-6, cpu=value * 1e-6), Block(wall=0.0, cpu=0.0)] for value in microseconds]

    found = rows(["handwritten", "grappe"], {0: blocks(100, 200, 300), 1: blocks(110, 220, 330)})
    assert found[1][1:4] == ["220 (165 to 275)", "+20 ±9 (+15 to +25) (aim: at most 25)", "1.100 (1.100 to 1.100)"]


def test_an_exported_program_is_compared_within_a_round(tmp_path):
    answers = [
        {name: exported.Answer(first=first * time, cpu=cpu * time) for name, first, cpu in figures}
        for time in (1.0, 1.5, 2.0)
        for figures in [(("python", 2.0, 1.0), ("grappe", 3.0, 2.0), ("cpp", 0.5, 0.1))]
    ]
    found = {row[0]: row[1:] for row in exported.start_rows(answers)}
    ratio = "0.25 (0.25 to 0.25), aim: 0.25", "0.10 (0.10 to 0.10), aim: 0.25"
    assert found["C++ program"] == ["0.75 (0.62 to 0.88)", ratio[0], "0.15 (0.12 to 0.18)", ratio[1]]
    rows_of_calls = exported.latency_rows({"eager": [2e-5, 4e-5], "package": [1e-5, 1e-5]})
    assert rows_of_calls[1] == ["the package, in Python", "10 (10 to 10)", "0.38 (0.31 to 0.44)"]
    told = exported.answer([sys.executable, "-c", "print('class', flush=True)"], tmp_path)
    assert told.first > 0
    assert told.cpu > 0
    with pytest.raises(RuntimeError, match="ended with 3"):
        exported.answer([sys.executable, "-c", "raise SystemExit(3)"], tmp_path)


class Clock:
    """A clock that goes only when told to: how long a test is kept waiting does not count."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "process_time", lambda: self.now / 2)

    def advance(self, seconds: float) -> None:
        self.now += seconds


def test_a_pacer_times_its_block_and_nothing_else(monkeypatch):
    clock = Clock(monkeypatch)
    ours, theirs = multiprocessing.Pipe()
    pacer = Pacer(theirs, warmup=3, block=10)
    stops = []

    def loop() -> None:
        for _ in range(27):
            clock.advance(MILLISECOND)
            stops.append(pacer.tick())

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    assert ours.recv() is None
    for _ in range(2):
        clock.advance(100 * MILLISECOND)  # the others' turns
        ours.send("go")
        took = ours.recv()
        assert took.wall == pytest.approx(MILLISECOND)
        assert took.cpu == pytest.approx(MILLISECOND / 2)
    ours.send("go")
    thread.join(PATIENCE_SECONDS)
    assert [index for index, stop in enumerate(stops) if stop] == [0, 13, 26]


@pytest.mark.parametrize("size", [2, 1])
def test_contenders_take_turns(size, tmp_path):
    pace = Pace(rounds=2, warmup=5, block=2000 // size)  # tenths of a second: a bar is drawn in each
    modules = ["handwritten", "grappe"]
    blocks = rotate(modules, size, pace, tmp_path)
    assert all(len(one) == size and all(block.wall > 0 for block in one) for taken in blocks.values() for one in taken)
    assert [len(taken) for taken in blocks.values()] == [2, 2]
    witness(tmp_path / "1", 2 * pace.block)


def test_a_contender_that_fails_is_shown_with_its_last_lines(tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)nothing_like_it died.*ModuleNotFoundError"):
        rotate(["nothing_like_it"], 1, Pace(rounds=1, warmup=1, block=1), tmp_path)


@pytest.mark.parametrize("rivals", ["accelerate", "fabric,trainer"])
def test_rivals_take_turns(rivals, tmp_path):
    modules = rivals.split(",")
    if not all(map(installed, modules)):
        pytest.skip("the rivals have an environment of their own: benchmarks/run")
    blocks = rotate(["handwritten", *modules], 2, Pace(rounds=1, warmup=2, block=10), tmp_path)
    assert [len(blocks[place][0]) for place in range(len(blocks))] == [2] * (1 + len(modules))


def test_a_section_is_charged_for_its_own_time_only(monkeypatch):
    clock = Clock(monkeypatch)
    sections = Sections()
    inner = sections.wrapped(lambda: clock.advance(20 * MILLISECOND), "inner")
    outer = sections.wrapped(lambda: (clock.advance(10 * MILLISECOND), inner()), "outer")
    outer()
    assert sections.calls == {"inner": 1, "outer": 1}
    assert sections.seconds["inner"] == pytest.approx(20 * MILLISECOND)
    assert sections.seconds["outer"] == pytest.approx(10 * MILLISECOND)


def test_cifar_files_are_as_the_official_ones(tmp_path):
    folder = cifar_files.write(tmp_path, per_file=3)
    images, labels = cifar10_python([folder / name for name in cifar_files.TRAINING])
    assert images.shape == (15, 3, 32, 32) and labels.shape == (15,)
    content = pickle.loads((folder / "data_batch_2").read_bytes(), encoding="latin1")
    assert (content["data"].reshape(-1, 3, 32, 32) == images[3:6]).all() and content["labels"] == labels[3:6].tolist()
    assert len(pickle.loads((folder / "batches.meta").read_bytes())["label_names"]) == 10


def test_grappe_takes_one_whole_epoch_of_them(tmp_path):
    cifar_files.write(tmp_path / "data", per_file=256)
    assert cifar_script.grappe(tmp_path, "threads=1,channels_last", tmp_path / "run", 256) > 0
    with pytest.raises(AssertionError, match="not one whole epoch"):
        cifar_script.grappe(tmp_path, "threads=1", tmp_path / "other", 257)


@pytest.mark.parametrize("processes", [1, 2])
def test_compute_alone_gives_a_rate(processes):
    assert compute_alone.images_per_second(processes, 1, 64, 2, True) > 0


def test_a_command_that_fails_says_what_it_said(tmp_path):
    assert cifar_script._rate("warning\nimages/s 4308.5\n") == 4308.5
    assert commands.output([sys.executable, "-c", "print(1)"], tmp_path) == "1\n"
    with pytest.raises(RuntimeError, match=r"(?s)ended with 3:.*why"):
        commands.output([sys.executable, "-c", "print('why'); raise SystemExit(3)"], tmp_path)


def test_processes_together_have_environments_of_their_own_and_one_that_fails_ends_the_others(tmp_path):
    command = [sys.executable, "-c", "import os; print(os.environ['WHO'])"]
    assert commands.together(command, tmp_path, [{"WHO": "a"}, {"WHO": "b"}]) == ["a\n", "b\n"]
    code = "import os, time; time.sleep(600) if os.environ['WHO'] == 'a' else exit('gone')"
    with pytest.raises(RuntimeError, match=r"(?s)ended with 1:.*gone"):
        commands.together([sys.executable, "-c", code], tmp_path, [{"WHO": "a"}, {"WHO": "b"}])


def test_a_page_is_compared_within_a_round():
    def turn(script: float, ours: float) -> dict[str, pages.Figure]:
        figure = pages.Figure(rate=script, command=20.0)
        return {pages.SCRIPT: figure, "replicate=2": pages.Figure(rate=ours, command=10.0)}

    found = pages.rows(pages.PAGES["ddp"], [turn(100, 200), turn(50, 150), turn(100, 400)])
    assert found[0][:2] == ["the script", "100 (75 to 100)"]
    assert [found[1][2], found[1][4]] == ["3.00 (2.50 to 3.50)", "2.00 (2.00 to 2.00)"]


@pytest.mark.parametrize("page", pages.PAGES.values(), ids=pages.PAGES)
def test_a_page_has_its_script_which_says_where_it_is_from(page):
    tree = ast.parse((Path(pages.__file__).parent / "scripts" / page.script).read_text())
    assert "of the Digital Research Alliance of Canada's PyTorch page" in str(ast.get_docstring(tree))


def test_the_pages_data_parallel_script_is_replaced(tmp_path):
    if not commands.TORCHVISION.is_dir():
        pytest.skip("the rivals have an environment of their own: benchmarks/run")
    cifar_files.write(tmp_path / "data", per_file=256)
    page = pages.PAGES["ddp"]
    theirs = pages.script(page, tmp_path, tmp_path / "data", 1280, commands.TORCHVISION)
    ours = pages.training(page, page.plans[0], tmp_path / "run", tmp_path / "data", 1280)
    assert theirs.rate > 0 and ours.rate > 0


def test_lines_that_are_changed_added_or_removed_count_once():
    assert lines_changed("a\nb\nc\nd\n", "a\nB\nc\nd\ne\n") == 2
    assert lines_changed("a\nb\nc\n", "a\nc\n") == 1
    assert lines_changed("a\nb\n", "a\nX\nY\nb\n") == 2
