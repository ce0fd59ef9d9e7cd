"""Prompts by place: every epoch sees each prompt once, and any place can be asked for first."""

from cluster.contracts.types import Prompt, SamplingParams, sample_seed
from cluster.rollouts.tickets import TicketOffice, evaluation_tickets


class Numbers:
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return Prompt(prompt_id=str(index), text=str(index))


def office(seed=0):
    return TicketOffice(source=Numbers(), seed=seed, trajectories_per_group=2, sampling=SamplingParams(max_tokens=3))


def test_an_epoch_sees_each_prompt_once():
    ids = [office().prompt(index).prompt_id for index in range(5)]
    assert sorted(ids) == ["0", "1", "2", "3", "4"]


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {
        tuple(office(seed).prompt(i).prompt_id for i in range(start, start + 5)) for seed in (0, 1) for start in (0, 5)
    }
    assert len(orders) == 4


def test_a_resumed_run_gets_the_tickets_that_the_first_would_have_got():
    there, here = office(), office()
    for index in range(12):
        there.ticket(index, policy_version=0)
    assert there.ticket(7, policy_version=0) == here.ticket(7, policy_version=0)


def test_seeds_differ_by_group_and_sample():
    seeds = {sample_seed(office().ticket(i, policy_version=0).seed, sample) for i in range(50) for sample in range(8)}
    assert len(seeds) == 400 and max(seeds) < 2**31


def test_evaluation_is_the_same_every_time_and_never_a_training_group():
    tickets = [
        evaluation_tickets(
            Numbers(), num_prompts=9, num_samples=1, seed=0, sampling=SamplingParams(max_tokens=3), policy_version=v
        )
        for v in (0, 0)
    ]
    assert tickets[0] == tickets[1] and [t.index for t in tickets[0]] == [-1, -2, -3, -4, -5]
