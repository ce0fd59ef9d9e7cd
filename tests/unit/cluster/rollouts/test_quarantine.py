"""Who is blamed for a death, and for how long."""

from cluster.contracts.types import Prompt, SamplingParams, Ticket
from cluster.rollouts.quarantine import Suspects
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


def suspects() -> Suspects:
    return Suspects(max_failures=3, events=ListedEvents())


def test_a_prompt_is_a_suspect_after_two_deaths_and_guilty_when_the_third_is_its_own():
    watched = suspects()
    a, b = ticket("a"), ticket("b")
    assert watched.blame([a, b], death("w"), alone=False) == [] and not watched.has(a)
    assert watched.blame([a, b], death("w"), alone=False) == [] and watched.has(a) and watched.has(b)
    assert watched.blame([a], death("w"), alone=True) == [a]
    assert watched.is_guilty(ticket("a", index=7)), "in a later epoch too"
    assert not watched.is_guilty(b)


def test_deaths_in_company_prove_nothing_however_many():
    watched = suspects()
    for _ in range(10):
        assert watched.blame([ticket("a")], death("w"), alone=False) == []


def test_a_finished_group_clears_its_prompt():
    watched = suspects()
    for _ in range(2):
        watched.blame([ticket("a")], death("w"), alone=False)
    watched.absolve(ticket("a"))
    assert not watched.has(ticket("a"))
