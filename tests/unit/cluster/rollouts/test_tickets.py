"""Prompts by place: every epoch sees each prompt once, and any place can be asked for first."""

import random
import threading

from cluster.contracts.sampling_config import SamplingConfig
from cluster.contracts.types import Prompt, sample_seed
from cluster.rollouts.mixture import Mixture
from cluster.rollouts.tickets import TicketOffice


class Numbers:
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return Prompt(prompt_id=str(index), text=str(index))


def office(seed=0):
    return TicketOffice(
        source=Mixture.of(Numbers()), seed=seed, trajectories_per_group=2, sampling=SamplingConfig(max_tokens=3)
    )


def test_an_epoch_sees_each_prompt_once():
    ids = [office().prompt(index).prompt_id for index in range(5)]
    assert sorted(ids) == ["0", "1", "2", "3", "4"]


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {
        tuple(office(seed).prompt(i).prompt_id for i in range(start, start + 5)) for seed in (0, 1) for start in (0, 5)
    }
    assert len(orders) == 4


async def test_a_resumed_run_gets_the_tickets_that_the_first_would_have_got():
    there, here = office(), office()
    all_of_them = await there.tickets(range(12), policy_version=0)
    assert await here.tickets([7], policy_version=0) == [all_of_them[7]]


async def test_prompts_are_made_ahead_in_a_thread_of_their_own_and_once():
    threads, made = set(), []

    class Slow(Numbers):
        def __getitem__(self, index):
            threads.add(threading.get_ident())
            made.append(index)
            return super().__getitem__(index)

    office = TicketOffice(
        source=Mixture.of(Slow()), seed=0, trajectories_per_group=2, sampling=SamplingConfig(max_tokens=3), num_ahead=2
    )
    await office.tickets([0], policy_version=0)
    await office.tickets([1, 2], policy_version=0)
    office.close()
    assert threading.get_ident() not in threads
    assert len(made) == len(set(made)) and 3 <= len(made) <= 5


async def test_the_order_of_an_epoch_is_not_made_anew_for_every_prompt(monkeypatch):
    """Around the end of an epoch, prompts of both epochs are asked for in turn."""
    shuffled = []
    monkeypatch.setattr(random.Random, "shuffle", lambda self, order: shuffled.append(len(order)))
    desk = office()
    for index in (4, 5, 4, 5, 4, 5):
        desk.prompt(index)
    assert shuffled == [5, 5]


async def test_seeds_differ_by_group_and_sample():
    tickets = await office().tickets(range(50), policy_version=0)
    seeds = {sample_seed(ticket.seed, sample) for ticket in tickets for sample in range(8)}
    assert len(seeds) == 400 and max(seeds) < 2**31
