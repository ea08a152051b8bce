"""Every site's scripts before a real sbatch: right ones are accepted, too many GPUs, hours or cores are refused."""

import subprocess
from pathlib import Path

import pytest

from grappe import sites
from grappe.contrib.slurm.script import render
from grappe.sites.layout import sliced
from tests.contrib.slurm.golden import MORE, SIZES, others, script, with_job
from tests.patience import PATIENCE_SECONDS
from tests.slurm.cluster import Cluster
from tests.slurm.shapes import hours, live, slices


def judge(text: str, partition: str, folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "job.sh"
    file.write_text(text)
    command = ["sbatch", "--test-only", f"--partition={partition}", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("site", live(), ids=lambda site: site.name)
def test_a_real_sbatch_judges(cluster: Cluster, tmp_path: Path, site) -> None:
    for size in SIZES:
        said = judge(render(script(site, size)), site.name, tmp_path)
        assert said.returncode == 0, f"{size}: {said.stderr}"
    whole = script(site, "1-node").layout
    for changes in (
        *([{"gpus": whole.gpus + 1}] if site.ask.gpus else []),
        {"seconds": int((hours(site) + 1) * 3600)},
        {"cores": whole.cores + 1},
        {"nodes": 3},
    ):
        said = judge(render(script(site, "1-node", **changes)), site.name, tmp_path)
        assert said.returncode != 0, f"{changes} were accepted: {said.stderr}"


@pytest.mark.parametrize("site", [site for site in live() if site.slice], ids=lambda site: site.name)
def test_a_real_sbatch_knows_the_names_of_slices(cluster: Cluster, tmp_path: Path, site) -> None:
    for part in site.slice:
        text = render(script(sliced(site, part.name), "1-gpu"))
        said = judge(text, slices(site), tmp_path)
        assert said.returncode == 0, said.stderr
        option = f"--gpus={part.name}:1"
        for other in (option.replace("gb:1", "gb:5"), option.replace("gb:1", "gbx:1"), "--gpus=whole:1"):
            said = judge(text.replace(option, other), slices(site), tmp_path)
            assert said.returncode != 0, f"{other} was accepted: {said.stderr}"


@pytest.mark.parametrize("end", others(sites.find("narval")))
@pytest.mark.parametrize("name", MORE)
def test_a_real_sbatch_judges_other_commands_and_options(cluster: Cluster, tmp_path: Path, name: str, end: str) -> None:
    made = others(sites.find(name))[end]
    options = tuple(option for option in made.job.sbatch if not option.startswith("--exclude"))
    said = judge(render(with_job(made, constraint=None, sbatch=options)), name, tmp_path)  # of real nodes
    assert said.returncode == 0, said.stderr
