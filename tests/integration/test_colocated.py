"""Colocated runs: learner and engines take turns, and on a CPU no memory moves. Nothing of what a run learns depends on it, nor on deaths
of either side or a Ctrl-C."""

import itertools
from functools import partial

import pytest

from tests.integration.faults import Run, assert_equal_bit_for_bit, undisturbed_run
from tests.integration.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

WORKING = ("assembling", "learning", "optimizing", "publishing", "saving")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return undisturbed_run(tmp_path_factory)


@pytest.fixture(scope="module")
def run(undisturbed, tmp_path_factory) -> Run:
    """Both sides die, then it is stopped; the rest of its steps nobody disturbs."""
    file, _ = undisturbed
    run = Run(tmp_path_factory.mktemp("colocated") / "run")
    with run.start(file, "rollout.colocated=true") as process:
        for number, actor in enumerate(("learner-0", "rollout-0")):
            until(lambda number=number: run.num_steps() > number, process=process)
            until(partial(run.strike, actor), process=process)
            until(lambda actor=actor: run.has_recovered(actor), process=process)
        process.press_ctrl_c()
        assert process.exit_code() == 130, process.output
        assert process.left_behind() == [] and "Traceback" not in process.output
    assert run.num_recorded() < 10 and not run.events("checkpoint_failed")
    return run.to_end(file, "rollout.colocated=true")


def test_deaths_of_either_side_and_a_ctrl_c_change_nothing_of_what_a_colocated_run_learns(undisturbed, run):
    _, other = undisturbed
    (resumed,) = run.events("resumed")
    told = range(resumed["recorded_steps"] + 1, 13)
    assert run.problems() == ()
    assert_equal_bit_for_bit(other, run, steps=range(1, 13), published=told, checkpoint=12)


def test_the_learner_rests_while_engines_sample_and_neither_works_beside_the_other(undisturbed, run):
    _, other = undisturbed
    since = run.events("resumed")[-1]["time"]
    assert not [event for event in run.events("failure") if event["time"] > since]
    phases = {actor: [line for line in lines if line["start"] > since] for actor, lines in run.phases().items()}
    names = [line["phase"] for line in phases["learner-0"]]
    assert "going to rest" in names  # on a CPU a rest takes no time, and some are not told
    assert all(line["phase"] != "going to rest" for line in other.phases()["learner-0"])
    working = [line for line in phases["learner-0"] if line["phase"] in WORKING]
    sampling = [line for line in phases["rollout-0"] if line["phase"] == "sampling"]
    assert working and sampling
    for one, another in itertools.product(working, sampling):
        assert one["end"] <= another["start"] or another["end"] <= one["start"], (one, another)
