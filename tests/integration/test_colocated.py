"""Colocated runs: learner and engines take turns, and on a CPU no memory moves. Nothing of what a run learns depends on it."""

import itertools
from functools import partial

import pytest

from tests.integration.faults import Run, assert_equal_bit_for_bit, undisturbed_run
from tests.integration.waiting import until

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
    rests = {
        of_run: [line["phase"] for line in each["learner-0"]].count("going to rest")
        for of_run, each in (("this", phases), ("other", other.phases()))
    }
    assert rests["this"] > rests["other"] == 0  # on a CPU a rest takes no time, and some are not told
    working = [
        line
        for line in phases["learner-0"]
        if line["phase"] in ("assembling", "learning", "optimizing", "publishing", "saving")
    ]
    sampling = [line for line in phases["rollout-0"] if line["phase"] == "sampling"]
    assert working and sampling
    for one, another in itertools.product(working, sampling):
        assert one["end"] <= another["start"] or another["end"] <= one["start"], (one, another)


def test_deaths_of_either_side_and_a_ctrl_c_change_nothing(undisturbed, tmp_path):
    file, other = undisturbed
    run = Run(tmp_path / "run")
    with run.start(file, "rollout.colocated=true") as process:
        for number, actor in enumerate(("learner-0", "rollout-0")):
            until(lambda number=number: run.num_steps() > number, process=process)
            until(partial(run.strike, actor), process=process)
            until(lambda actor=actor: run.has_recovered(actor), process=process)
        process.press_ctrl_c()
        assert process.exit_code() == 130, process.output
        assert process.left_behind() == [] and "Traceback" not in process.output
    assert run.num_recorded() < 12 and not run.events("checkpoint_failed")
    run.to_end(file, "rollout.colocated=true")
    assert run.problems() == ()
    assert_equal_bit_for_bit(other, run, steps=range(1, 13), published=[12], checkpoint=12)
