"""With a database of jobs: how a job ended, an account that one has not, and a limit on the number of jobs."""

import getpass
import time
from pathlib import Path

import pytest

from grappe import slurm as notebook
from grappe.contrib.slurm import slurm
from grappe.contrib.tune.study import open_study
from tests.commands import SLOW
from tests.patience import PATIENCE_SECONDS
from tests.slurm.cluster import Cluster
from tests.slurm.coordinators import coordinator, ends, jobs_of, says, words


def test_accounting_knows_how_jobs_ended(accounted: Cluster, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = here / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --account=def-test --time=5\nexit 3\n")
    job = slurm.submit(script)
    found = None
    deadline = time.monotonic() + PATIENCE_SECONDS
    with monkeypatch.context() as patch:
        ask = slurm.run
        patch.setattr(slurm, "run", lambda *words: ask(*words) if words[0] == "sacct" else "")  # no controller
        while found is None and time.monotonic() < deadline:
            found = slurm.ended(job)
            time.sleep(0.2)
    assert found == slurm.End(state="FAILED", code=3)
    with pytest.raises(slurm.SlurmError) as refusal:
        notebook.submit(f"{SLOW} --run refused --plan device=cpu", site="generic", account="def-other")
    assert "Invalid account or account/partition combination" in str(refusal.value)
    assert "sacctmgr show assoc" in str(refusal.value)
    assert not (here / "refused").exists()
    (here / "run" / "logs").mkdir(parents=True)
    with pytest.raises(slurm.SlurmError):
        notebook.submit(f"{SLOW} --run run --plan device=cpu", site="generic", account="def-other")
    assert [file.name for file in (here / "run" / "logs").iterdir()] == ["refused-1.sh"]


@pytest.mark.slow
def test_a_study_of_more_jobs_than_one_may_have(accounted: Cluster, tmp_path: Path) -> None:
    """Sites let a user have 1,000 jobs, say; here one."""
    limit = ("sacctmgr", "-i", "modify", "user", getpass.getuser(), "set")
    accounted.run(*limit, "MaxSubmitJobs=1")
    try:
        with coordinator(tmp_path / "s", *words(tmp_path / "not there"), trials=3, seed=2) as command:
            says(command, "waiting: sbatch takes no more jobs now: ")
            ends(command)
    finally:
        accounted.run(*limit, "MaxSubmitJobs=-1")
    assert [one.state for one in open_study(tmp_path / "s").trials] == ["complete"] * 3
    assert [len(one) for one in jobs_of(tmp_path / "s")] == [1, 1, 1]
