"""Colocated runs: learner and engines take turns, and on a CPU no memory moves. Nothing of what a run learns depends on it."""

import itertools

import pytest

from tests.integration.faults import Run, assert_equal_bit_for_bit, undisturbed_run

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 6


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return undisturbed_run(tmp_path_factory)


def test_a_colocated_run_equals_the_other_bit_for_bit_and_its_learner_rests_while_engines_sample(undisturbed, tmp_path):
    file, other = undisturbed
    run = Run(tmp_path / "run").to_end(file, "rollout.colocated=true", f"num_steps={STEPS}")
    assert_equal_bit_for_bit(other, run, steps=range(1, STEPS + 1))
    assert run.problems() == () and run.events("failure") == []
    phases = run.phases()
    rests = [line for line in phases["learner-0"] if line["phase"] == "going to rest"]
    assert len(rests) >= STEPS
    working = [
        line for line in phases["learner-0"] if line["phase"] in ("updating", "backward", "publishing", "saving")
    ]
    sampling = [line for line in phases["rollout-0"] if line["phase"] == "sampling"]
    assert working and sampling
    for one, another in itertools.product(working, sampling):
        assert one["end"] <= another["start"] or another["end"] <= one["start"], (one, another)
