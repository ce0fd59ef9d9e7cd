"""Prompts by place: every epoch sees each prompt once, and any place can be asked for first."""

import random
import threading
from concurrent.futures import Future
from dataclasses import replace

import pytest

from cluster.contracts.errors import DataError
from cluster.contracts.sampling_config import SamplingConfig
from cluster.contracts.types import Prompt, sample_seed
from cluster.rollouts.mixture import Mixture
from cluster.rollouts.tickets import TicketOffice
from tests.fakes import InlineExecutor


class Numbers:
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return Prompt(prompt_id=str(index), text=str(index))


def office(seed=0, *, source=None, **options):
    return TicketOffice(
        source=Mixture.of(source or Numbers()),
        seed=seed,
        trajectories_per_group=2,
        sampling=SamplingConfig(max_tokens=3),
        **options,
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

    desk = office(source=Slow(), num_ahead=2)
    await desk.tickets([0], policy_version=0)
    await desk.tickets([1, 2], policy_version=0)
    desk.close()
    assert threading.get_ident() not in threads
    assert len(made) == len(set(made)) and 3 <= len(made) <= 5


async def test_tickets_that_were_made_ahead_need_no_wait_and_more_are_made_when_half_of_them_are_gone():
    made = []

    class Listed(Numbers):
        def __getitem__(self, index):
            made.append(index)
            return super().__getitem__(index)

    desk = office(source=Listed(), num_ahead=4, thread=InlineExecutor())
    assert desk.made_ahead([0], policy_version=0) is None
    await desk.tickets([0], policy_version=0)
    num_made = len(made)
    assert num_made == 5, "0, and 1 to 4 ahead"
    ahead = desk.made_ahead([1], policy_version=7)
    assert ahead == await office().tickets([1], policy_version=7)
    assert len(made) == 5
    desk.made_ahead([2], policy_version=0)
    assert len(made) == 7, "5 and 6 as well"
    assert desk.made_ahead([6, 7], policy_version=0) is None, "7 is not there"
    assert len(desk.made_ahead([5, 6], policy_version=0) or ()) == 2, "6 still is"
    await desk.tickets([3], policy_version=0)
    assert [desk.made_ahead([index], policy_version=0) for index in (1, 3)] == [None, None], "they are let go"


async def test_a_prompt_that_the_thread_is_still_making_is_not_waited_for_where_nobody_may_wait():
    class MakesOne(InlineExecutor):
        has_made = False

        def submit(self, fn, /, *args, **kwargs):
            if self.has_made:
                return Future()
            self.has_made = True
            return super().submit(fn, *args, **kwargs)

    desk = office(num_ahead=4, thread=MakesOne())
    await desk.tickets([0], policy_version=0)
    assert desk.made_ahead([1], policy_version=0) is None


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


def limited(fits, *, size=5, seed=0):
    class Sized(Numbers):
        def __len__(self):
            return size

    return office(seed, source=Sized(), fit=fits)


def even(prompt):
    return prompt if int(prompt.prompt_id) % 2 == 0 else None


def test_the_place_of_a_prompt_that_does_not_fit_goes_to_another_and_no_other_place_changes():
    desk, whole = limited(even, size=10), limited(None, size=10)
    dealt = [int(desk.prompt(index).prompt_id) for index in range(200)]
    asked = [int(whole.prompt(index).prompt_id) for index in range(200)]
    assert all(got == wanted for got, wanted in zip(dealt, asked, strict=True) if wanted % 2 == 0)
    assert {got % 2 for got in dealt} == {0}
    counts = [dealt.count(row) for row in range(0, 10, 2)]
    assert min(counts) >= 28, "20 of their own, and about 20 of the 100 places that others left"
    assert [int(limited(even, size=10).prompt(index).prompt_id) for index in (150, 3)] == [dealt[150], dealt[3]]
    assert desk.drain_stats()["prompts/num_dropped"] >= 100 and desk.drain_stats() == {}


def test_a_shortened_prompt_is_sampled_and_counted():
    desk = limited(lambda prompt: replace(prompt, text="short") if prompt.prompt_id == "3" else prompt)
    assert sorted(str(desk.prompt(index).text) for index in range(5)) == ["0", "1", "2", "4", "short"]
    assert desk.drain_stats() == {"prompts/num_truncated": 1.0}


def test_the_only_prompt_that_fits_is_found_where_a_thousand_draws_miss_it():
    desk = limited(lambda prompt: prompt if prompt.prompt_id == "123" else None, size=500)
    assert {desk.prompt(index).prompt_id for index in range(60)} == {"123"}, "0.998^1000 = 0.14 miss it"


def test_a_source_of_which_nothing_fits_is_an_error_and_no_loop():
    with pytest.raises(DataError, match=r"none of the 5 prompts of the source fits prompts\.max_prompt_tokens"):
        limited(lambda prompt: None).prompt(0)
