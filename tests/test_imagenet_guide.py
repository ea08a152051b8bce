"""The guides on ImageNet and on augmentation: their commands and their task run, and learn."""

import json
import re
import shlex
from pathlib import Path

from benchmarks import photos

from grappe.data import augment
from grappe.finder import defaults
from grappe.tasks.imagenet import ImageNet
from tests.commands import GRAPPE, ran

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "imagenet.md").read_text()
COMMANDS = re.findall(r"^(?:grappe|python -m) .*", PAGE, re.MULTILINE)
AUGMENTATION = (DOCS / "augmentation.md").read_text()
QUICK = {
    "--images 2000": "--images 240",
    "image_size=64": "image_size=32",
    "batch_size=64": "batch_size=24",
    "lr=0.05": "lr=0.02 area=0.5",
    "--steps 50": "--steps 3",
}


def train(command: str, place: Path, run: str) -> list[dict]:
    words = [*shlex.split(command)[1:], "--run", run, "--plan", "threads=1,device=cpu,workers=0"]
    done = ran(GRAPPE, *words, cwd=place)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (place / run / "metrics.jsonl").read_text().splitlines()]


def test_the_commands_run_and_a_network_learns(here: Path) -> None:
    big, make, small, test_mode = COMMANDS
    assert big.startswith("grappe train imagenet --data")
    for before, after in QUICK.items():
        make, small, test_mode = (line.replace(before, after) for line in (make, small, test_mode))
    photos.main(shlex.split(make)[3:])
    scores = [one["accuracy"] for one in train(small, here, "learned") if one["kind"] == "evaluation"]
    assert max(scores) > 0.5  # one of four classes by chance
    steps = [one for one in train(test_mode, here, "tried") if one["kind"] == "step"]
    assert steps[-1]["step"] == 3


def test_every_field_in_the_table_is_a_field() -> None:
    table = "\n".join(line for line in PAGE.splitlines() if line.startswith("|"))
    elsewhere = {"mode", "max_lr", "label_smoothing", "replicate", "precision", "workers"}
    named = set(re.findall(r"\b(\w+)=", table)) - elsewhere
    assert named and named <= set(defaults(ImageNet)), named - set(defaults(ImageNet))


def test_the_task_of_the_augmentation_guide_trains(tmp_path: Path) -> None:
    [code] = re.findall(r"```python\n(.*?)```", AUGMENTATION, re.DOTALL)
    (tmp_path / "photos.py").write_text(code)
    photos.make_photos(tmp_path / "photos", 40)
    records = train("grappe train photos.py --data photos epochs=1", tmp_path, "run")
    assert [one["count"] for one in records if one["kind"] == "evaluation"] == [8]


def test_every_function_is_in_the_guide() -> None:
    assert all(f"`{name}(" in AUGMENTATION for name in augment.__all__)
