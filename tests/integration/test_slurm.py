"""deploy/slurm/train.sbatch under a real SLURM of two nodes: one run over both, which saves when its time is up and goes on from there."""

import re

import pytest

from tests.integration.commands import QUICKSTART, SMALL, treadwheel
from tests.integration.faults import Run
from tests.integration.machines import folder_of, slurm
from tests.integration.waiting import until
from tests.programs import needs

pytestmark = [
    pytest.mark.ray,
    pytest.mark.engine,
    pytest.mark.acceptance,
    pytest.mark.timeout(1800),
    needs("ip", package="iproute2"),
    needs("munged", package="munge"),
    needs("slurmctld", package="slurmctld"),
    needs("slurmd", package="slurmd"),
]

NUM_STEPS = 40
OVER_BOTH = (
    "learner.num_ranks=2",
    "learner.cpus_per_rank=4",  # of a node's 6: no node has room for two
    "learner.num_threads=1",
    "rollout.num_workers=2",
    "rollout.cpus_per_worker=1",
)


@pytest.fixture
def folder():
    with folder_of("slurm") as folder:
        yield folder


def test_a_run_over_two_nodes_saves_when_it_is_told_to_end_and_its_job_goes_on_from_there(folder):
    conf, run, said = {"SLURM_CONF": str(folder / "slurm.conf")}, Run(folder / "run"), folder / "said"
    overrides = [f"run_dir={run.path}", f"num_steps={NUM_STEPS}", *OVER_BOTH, *SMALL]
    with slurm(folder) as machines:

        def job(field):
            shown = machines.run("alpha", "scontrol", "show", "job", number, env=conf)
            found = re.search(rf"\b{field}=(\S+)", shown)
            assert found, shown
            return found[1]

        options = ("--parsable", "--nodes=2", "--cpus-per-task=6", f"--output={said}", "deploy/slurm/train.sbatch")
        number = machines.run("alpha", "sbatch", *options, QUICKSTART, *overrides, env=conf).strip()
        until(lambda: run.num_steps() > 1)
        # As SLURM does with --signal=B:TERM@120, two minutes before the time is up.
        machines.run("alpha", "scancel", "--signal=TERM", "--batch", number, env=conf)
        until(lambda: job("Restarts") == "1" and job("JobState") == "PENDING")
        saved = re.findall(r"stopped; step (\d+) is saved", said.read_text())
        assert len(saved) == 1 and 0 < int(saved[0]) < NUM_STEPS, said.read_text()
        # SLURM waits two minutes by itself.
        machines.run("alpha", "scontrol", "update", f"JobId={number}", "StartTime=now", env=conf)
        until(lambda: job("JobState") in {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"})
        assert job("JobState") == "COMPLETED", said.read_text()
    lines = run.directory.read_json_lines("metrics.jsonl")
    assert {line["policy_version"] for line in lines} == {*range(NUM_STEPS + 1)}
    assert treadwheel("verify", run.path).returncode == 0
