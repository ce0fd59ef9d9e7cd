"""A machine that stops answering in mid-run, as when a switch fails: no process ends, and no connection is closed."""

import json
import secrets

import pytest

from tests.integration.commands import treadwheel
from tests.integration.faults import Run, write_endless_run
from tests.integration.machines import ADDRESSES, folder_of, machines
from tests.integration.waiting import until
from tests.models import make_tiny_model
from tests.programs import needs

pytestmark = [
    pytest.mark.ray,
    pytest.mark.engine,
    pytest.mark.acceptance,
    pytest.mark.timeout(1200),
    needs("ip", package="iproute2"),
]

HEAD = f"{ADDRESSES['alpha']}:6379"
SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}
"""Ray misses a machine within ten seconds, and not within a minute."""
ENV = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture
def folder():
    with folder_of("silent") as folder:
        yield folder


def test_a_run_goes_on_without_a_machine_that_stops_answering_and_takes_it_back(folder):
    run = Run(folder / "run")
    room = {"rollout__num_workers": 2, "rollout__cpus_per_worker": 3, "learner__cpus_per_rank": 2}
    file = write_endless_run(folder, make_tiny_model(folder / "model"), **room)
    with machines(folder) as found:

        def add(name, *options):
            found.start(name, "ray", "start", "--block", *options, env=ENV)

        def answers():
            return found.ends_well("alpha", "ray", "health-check", f"--address={HEAD}", env=ENV)

        add("alpha", "--head", "--port=6379", "--num-cpus=6", f"--system-config={json.dumps(SOON)}")
        until(answers)
        add("beta", f"--address={HEAD}", "--num-cpus=3")
        found.start("alpha", "treadwheel", "train", "--address", HEAD, str(file), f"run_dir={run.path}", env=ENV)
        until(lambda: len(run.samplers()) == 2)
        found.silence("beta")
        until(lambda: run.events("failure"))
        (lost,) = run.events("failure")
        assert lost["actor_kind"] == "rollout_worker", lost
        num_steps = run.num_steps()
        until(lambda: run.num_steps() > num_steps + 3)
        found.unsilence("beta")
        until(lambda: not found.ends_well("beta", "pgrep", "raylet"))
        # As whatever keeps a machine's Ray running does.
        add("beta", f"--address={HEAD}", "--num-cpus=3")
        until(lambda: run.events("recovery"))
        num_steps = run.num_steps()
        until(lambda: run.num_steps() > num_steps + 3)
        found.run("alpha", "pkill", "--signal=INT", "--full", "treadwheel train")
        until(lambda: run.events("stopped"))
    assert sorted(run.metrics()) == [*range(1, run.num_steps() + 1)]
    assert treadwheel("verify", run.path).returncode == 0
