"""Who is blamed for a death, and for how long."""

import pytest

from cluster.contracts.errors import DeadlineError, EngineError, WeightsError, WorkerError
from cluster.contracts.types import Prompt, SamplingParams, Ticket
from cluster.rollouts.quarantine import Suspects, may_be_their_doing
from tests.fakes import ListedEvents, death


def ticket(name: str, index: int = 0) -> Ticket:
    return Ticket(
        index=index,
        prompt=Prompt(prompt_id=name, text=name),
        num_trajectories=2,
        seed=0,
        policy_version=0,
        sampling=SamplingParams(max_tokens=1),
    )


def suspects(max_failures: int = 3) -> Suspects:
    return Suspects(max_failures=max_failures, events=ListedEvents())


def test_a_prompt_is_a_suspect_after_two_deaths_and_guilty_when_the_third_is_its_own():
    watched = suspects()
    a, b = ticket("a"), ticket("b")
    watched.blame([a, b], death("w"), alone=False)
    assert not watched.has(a)
    watched.blame([a, b], death("w"), alone=False)
    assert watched.has(a) and watched.has(b) and not watched.is_guilty(a)
    watched.blame([a], death("w"), alone=True)
    assert watched.is_guilty(ticket("a", index=7)), "in a later epoch too"
    assert not watched.is_guilty(b)


def test_deaths_in_company_prove_nothing_however_many():
    watched = suspects()
    for _ in range(10):
        watched.blame([ticket("a")], death("w"), alone=False)
    assert not watched.is_guilty(ticket("a"))


def test_one_death_counts_once_for_a_prompt_that_was_sampled_twice():
    watched = suspects()
    watched.blame([ticket("a", index=0), ticket("a", index=1)], death("w"), alone=False)
    assert not watched.has(ticket("a"))


def test_a_finished_group_clears_its_prompt():
    watched = suspects()
    for _ in range(2):
        watched.blame([ticket("a")], death("w"), alone=False)
    watched.absolve(ticket("a"))
    assert not watched.has(ticket("a"))


def test_a_prompt_that_was_never_blamed_is_no_suspect_even_where_one_failure_is_proof():
    watched = suspects(max_failures=1)
    assert not watched.has(ticket("a"))
    watched.blame([ticket("a"), ticket("b")], death("w"), alone=False)
    assert watched.has(ticket("a")) and not watched.is_guilty(ticket("a"))


def test_failures_are_counted_for_the_ten_thousand_prompts_blamed_last():
    """A prompt that is blamed and then dropped is never absolved: in a long run these would pile up."""
    watched = suspects()
    for name in ("old", "new"):
        watched.blame([ticket(name)], death("w"), alone=False)
    watched.blame([ticket(str(number)) for number in range(9_998)], death("w"), alone=False)
    watched.blame([ticket("new")], death("w"), alone=False)
    assert watched.has(ticket("new"))
    watched.blame([ticket("one more")], death("w"), alone=False)
    watched.blame([ticket("old")], death("w"), alone=False)
    assert not watched.has(ticket("old")), "its first failure is forgotten"
    assert watched.has(ticket("new"))


NOT_IN_TIME = DeadlineError("w did not finish 'load' within 600 s", actor="w", stage="load")
SILENT = DeadlineError("w did not finish 'progress' within 60 s", actor="w", stage="progress")
BUG = WorkerError("w failed in 'generate': TypeError", actor="w", stage="generate")
NO_ENGINE = EngineError("w: the engine ended: CUDA error", actor="w", stage="generate")
UNATTESTED = WeightsError("nothing is served: the last load failed")


@pytest.mark.parametrize(
    ("ended_by", "given_up", "is_theirs"),
    [
        (death("w"), None, True),
        (BUG, None, True),
        (UNATTESTED, None, False),
        (death("w"), death("w"), True),
        (death("w"), SILENT, True),
        (death("w"), NO_ENGINE, True),
        (death("w"), NOT_IN_TIME, False),
        (death("w"), BUG, False),
        (BUG, BUG, True),
    ],
)
def test_a_call_that_dies_because_the_driver_killed_its_actor_blames_nobody(ended_by, given_up, is_theirs):
    assert may_be_their_doing(ended_by, given_up=given_up) is is_theirs
