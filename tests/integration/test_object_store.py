"""Whole runs in an object store: killed at ten points among faults, claimed by two drivers, read by every command.

A point is a request: the process that makes it is struck then and there, however fast the machine is.
"""

import json
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cluster.record.storage import Storage
from cluster.record.store_claim import LEASE_S
from cluster.record.stored_models import CACHE_ENV
from tests.integration.commands import treadwheel
from tests.integration.faults import Run, assert_equal_bit_for_bit, undisturbed_run, until
from tests.object_store import environment, s3
from tests.store_proxy import KINDS, Fault, Proxy, seeded

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.acceptance, pytest.mark.timeout(1800)]
STEPS = range(1, 13)
STEPS_OF_TWO = 6
"""Of the run that two drivers claim: three behind the one at which the first stands still."""
AWAY_S = 3.0
MOMENTS = (
    ("PUT trajectories/step-000002", "killed_before"),  # the recorder
    ("PUT ledger/000003", "away"),
    ("PUT checkpoints/.*/model.safetensors", "killed_after"),  # the learner, which saves beside training
    ("GET checkpoints/.*/manifest.json", None),  # that checkpoint stands now
    ("PUT ledger/", "killed_after"),  # the driver: the step is recorded, and not learned
    ("GET checkpoints/.*/state-", "killed_after"),  # the learner, which restores
    ("PUT checkpoints/.*/manifest.json", "killed_after"),  # the learner: the checkpoint stands, and it never hears
    ("PUT ledger/0000(08|11)", "killed_before"),  # the driver: trajectories are there that no record names
    ("PUT run.yaml", "killed_after"),  # the driver, which has just claimed the directory
    ("GET trajectories/", "killed_before"),  # the recorder, which reads what is learned again
    ("PUT checkpoints/step-000012/.*/state-", "killed_before"),  # the learner, in the last save
)
"""What is waited for below the run directory, once the one before has come, and what then befalls the process that asks, or the store."""


@dataclass
class Misfortune:
    """The faults of `moments` in their turn, and those of `otherwise` in between."""

    run_dir: str
    moments: Sequence[tuple[str, str | None]]
    otherwise: Fault
    came: list[str] = field(default_factory=list)
    """The request of each moment so far."""
    _away_until: float = 0.0

    def __call__(self, method: str, path: str, number: int) -> str | None:
        if time.monotonic() < self._away_until:
            return "reset_before"
        asked = f"{method} {path.partition(self.run_dir.removeprefix('s3:/') + '/')[2]}"
        wanted, fault = self.moments[len(self.came)] if len(self.came) < len(self.moments) else (r"(?!)", None)
        if not re.match(wanted, asked):
            return self.otherwise(method, path, number)
        self.came.append(asked)
        if fault == "away":
            self._away_until = time.monotonic() + AWAY_S
            return "reset_before"
        return fault


@pytest.fixture(scope="module")
def proxy(tmp_path_factory) -> Iterator[Proxy]:
    with s3("runs") as proxy, environment({CACHE_ENV: str(tmp_path_factory.mktemp("cache"))}):
        yield proxy


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[Path, Run]:
    """(run file, a run of it on a disk that nobody hurt)."""
    return undisturbed_run(tmp_path_factory)


@pytest.fixture(scope="module")
def survivor(proxy, undisturbed) -> tuple[Run, Misfortune]:
    """Each driver after the first is there, and waits, before the claim of the killed one lapses."""
    file, _ = undisturbed
    run = Run("s3://runs/survivor")
    proxy.fault = misfortune = Misfortune(run.path, MOMENTS, seeded(7, share=0.1))
    num_killed = 0
    while True:
        with run.start(file, "supervision.backoff_s=0", "--wait-for-claim", "10m") as driver:
            if num_killed:
                until(lambda driver=driver: "s for it" in driver.output, process=driver)
                proxy.pass_time(LEASE_S + 1)
            if (code := driver.exit_code()) == 0:
                break
            assert code == -signal.SIGKILL, driver.output
            num_killed += 1
    proxy.fault = lambda method, path, number: None
    return run, misfortune


def test_a_run_that_was_killed_and_cut_off_at_ten_points_equals_the_undisturbed_one_on_a_disk(
    proxy, undisturbed, survivor
):
    (_, alone), (run, misfortune) = undisturbed, survivor
    assert len(misfortune.came) == len(MOMENTS), misfortune.came
    assert set(KINDS) <= set(proxy.made)
    assert_equal_bit_for_bit(alone, run, steps=STEPS, published=sorted(run.weights()), checkpoint=12)
    assert 12 in run.weights(), "of earlier steps a killed driver may lose the events"
    assert run.groups() == alone.groups() == [tuple(range(4 * step, 4 * step + 4)) for step in range(12)]
    assert run.problems() == ()


@pytest.fixture(scope="module")
def split(proxy, undisturbed) -> tuple[Run, str, str]:
    """(the run, what a driver that did not wait was told, what the first one said in the end). The first one stands still while it records
    step 3, until the second one, which takes it for dead, is past that step. Their model is one of the store."""
    file, alone = undisturbed
    run, base = Run("s3://runs/split"), Storage("s3://runs/base")
    for path in (alone.path / "checkpoints").glob("step-000012/**/*.*"):
        base.upload(str(path.relative_to(alone.path)), str(path))
    settings = (f"model.path={base.path('checkpoints/step-000012/model')}", f"num_steps={STEPS_OF_TWO}")
    proxy.fault = misfortune = Misfortune(run.path, [("PUT ledger/000003", "stopped_before")], seeded(8, share=0.02))
    with run.start(file, *settings) as first:
        until(run.directory.owner, process=first)
        with run.start(file, *settings, "--wait-for-claim", "10m") as second:
            refused = treadwheel("train", file, f"run_dir={run.path}", *settings)
            assert refused.returncode == 2, refused.stderr
            until(lambda: misfortune.came and "s for it" in second.output, process=second)
            proxy.pass_time(LEASE_S + 1)
            until(lambda: run.num_recorded() > 3, process=second)
            first.send(signal.SIGCONT)
            assert first.exit_code() == 1, first.output
            assert first.left_behind() == []
            assert second.exit_code() == 0, second.output
        told = first.output
    proxy.fault = lambda method, path, number: None
    return run, refused.stderr, told


def test_a_second_driver_is_refused_and_one_that_wakes_ends_with_one_clear_line(split):
    _, refused, told = split
    assert re.fullmatch(
        r"treadwheel: run_dir='s3://runs/split' is in use by process \d+ on \S+, \w+; wait for it .*\n", refused
    )
    last = told.splitlines()[-1]
    # The second where it stood still for longer than a request may take.
    known = "step 3 of run_dir='s3://runs/split' was recorded", "run_dir='s3://runs/split' was taken over"
    assert any(re.match(rf"treadwheel: {each} by process \d+ on ", last) for each in known), told
    assert "Traceback" not in told


def test_what_two_drivers_recorded_is_one_run(split):
    run, _, _ = split
    assert run.groups() == [tuple(range(4 * step, 4 * step + 4)) for step in range(STEPS_OF_TWO)]
    assert run.problems() == ()
    assert run.replay().endswith(": equal\n")


def test_a_run_in_a_store_is_verified_shown_traced_evaluated_and_learned_from(undisturbed, survivor, tmp_path):
    (file, _), (run, _) = undisturbed, survivor

    def said(command: str, *arguments: object) -> str:
        done = treadwheel(command, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert re.match("12 steps, 48 groups, .*: clean", said("verify", run.path))
    assert re.search(r"steps +12 of 12 *\n *driver +none: the run is finished", said("info", run.path))
    said("trace", run.path, "--steps", "12", "--out", tmp_path / "trace.json")
    made = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"learning", "sampling", "judging"} <= {each["name"] for each in made if each["ph"] == "X"}
    prompts = "evaluation.prompts={name: reasoning_gym, task: basic_arithmetic, size: 8, seed: 2}"
    assert "eval/num_prompts 8" in said("eval", run.path, prompts)
    learned = Run("s3://runs/learned")
    whole = ("algorithm.selection=null", "rollout.extra_trajectories=0")
    said("learn", run.path, file, f"run_dir={learned.path}", "num_steps=2", *whole)
    assert learned.problems() == () and learned.num_recorded() == 2
