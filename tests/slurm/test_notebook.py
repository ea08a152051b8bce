"""The course's notebook on a real Slurm: gpu_jobs_submitter, display_slurm_queue and search_log, as it calls them."""

from pathlib import Path

from tests.slurm.cluster import Cluster
from tests.test_notebook import executed

SCRIPT = """
import os, sys

print("batch", sys.argv[2], "process", os.environ["SLURM_PROCID"], "of", os.environ["SLURM_NTASKS"])
"""
SUBMIT = """
from grappe.slurm import display_slurm_queue, gpu_jobs_submitter, search_log

command = "dlojz.py -b 128"
n_gpu = [1, 2]
jobids = gpu_jobs_submitter(command, n_gpu, name="dlojz", time_max="00:10:00", cpus_per_task=1, site="generic")
"""
SHOW = """
display_slurm_queue("dlojz", timestep=1)
paths = search_log(contains=jobids[1:])
print(len(search_log("dlojz")), open(paths[0]).read())
"""


def test_the_courses_cells(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "dlojz.py").write_text(SCRIPT)
    submitted, shown, last = executed([SUBMIT, SHOW, "print(jobids)"], tmp_path)
    assert submitted.count("job ") == 2
    assert "no job is left in the queue" in shown
    assert "2 " in shown
    assert {f"batch 128 process {rank} of 2" in shown for rank in range(2)} == {True}
    assert last.count("'") == 4
