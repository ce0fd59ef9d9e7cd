"""Which prompts are worth sampling is known from the record alone, whatever the timing was."""

import asyncio
import random
from bisect import bisect_right
from collections import Counter
from unittest.mock import Mock

import pytest

from cluster.contracts.errors import LedgerError
from cluster.contracts.prompts_config import DifficultyConfig
from cluster.contracts.sampling_config import SamplingConfig
from cluster.contracts.types import Group, GroupSummary, Prompt, Ticket
from cluster.record.ledger import Ledger
from cluster.record.run_directory import RunDirectory
from cluster.rollouts.buffer import Buffer
from cluster.rollouts.destinations import TrainingGroups
from cluster.rollouts.mixture import Mixture
from cluster.rollouts.pass_rates import PassRates, preference
from cluster.rollouts.tickets import TicketOffice
from tests.fakes import InlineExecutor
from tests.unit.cluster.simulated_time import run_simulated


def judged(prompt_id="p", rewards=(1.0,)):
    return GroupSummary(
        group_id="0",
        prompt_id=prompt_id,
        num_trajectories=len(rewards),
        num_tokens=1,
        size_bytes=1,
        oldest_versions=(0,),
        rewards=rewards,
    )


def rates(*recorded, lag=0, **config):
    return PassRates(DifficultyConfig(**config), lag=lag, recorded=recorded)


@pytest.mark.parametrize(
    ("rate", "target", "wanted"),
    [(0.5, 0.5, 1.0), (0.75, 0.5, 0.5), (0.0, 0.5, 0.1), (1.0, 0.2, 0.1), (0.6, 0.2, 0.5), (0.1, 0.2, 0.875)],
)
def test_preference_falls_in_a_line_from_the_target(rate, target, wanted):
    assert preference(rate, target=target) == pytest.approx(wanted)


def test_a_group_counts_its_known_rewards_and_is_known_from_its_step_on():
    known = rates()
    known.measure(0, judged("a", (1.0, 0.5, None, 2.0, 0.0)))
    known.measure(2, judged("b"))
    assert known.of_step(2) == {"a": 0.5}, "two of four succeeded; group 2 is of the next step"
    assert known.of_step(3) == {"b": 1.0}


class NotWalkedThrough(list[tuple[int, float]]):
    def __iter__(self):
        raise AssertionError("every measurement is looked at")


def test_a_prompt_that_was_measured_often_costs_no_more_to_look_up():
    """After weeks there are thousands of each prompt, and every group's choice looks up several prompts."""
    known = rates(*((step, {"p": step % 2 / 2}) for step in range(1, 1001)))
    known._known["p"] = NotWalkedThrough(known._known["p"])
    assert [known.wants("p", index=index, drawn=0.5) for index in (0, 501, 1000)] == [True, True, False]


def test_a_solved_prompt_rests_for_so_many_steps_and_comes_back_rarely():
    known = rates((4, {"p": 1.0}), (8, {}), (12, {}), skip_solved_steps=2)
    assert known.wants("p", index=3, drawn=0.99), "its step is not known to group 3"
    assert [known.wants("p", index=index, drawn=0.0) for index in (4, 8, 12)] == [False, False, True]
    assert not known.wants("p", index=12, drawn=0.1), "a tenth of the time"
    assert known.wants("new", index=12, drawn=0.99)


def test_a_choice_knows_the_steps_that_end_a_lag_before_it():
    known = rates((4, {"p": 0.0}), (8, {"p": 0.5}), lag=4)
    assert [known.wants("p", index=index, drawn=0.5) for index in (7, 8, 11, 12)] == [True, False, False, True]


async def test_a_group_that_a_filter_drops_is_measured_too():
    """It is the solved prompts that filters of equal rewards drop."""
    buffer, known = Buffer(groups_per_step=1), rates()
    groups = TrainingGroups(
        buffer,
        scorers=None,
        dropped_by=lambda summary: "zero_variance",
        choose=None,
        wants_reference=lambda index: False,
        max_failed_share=0.5,
        measure=known.measure,
        events=Mock(),
    )
    (index,) = buffer.start()
    prompt = Prompt(prompt_id="p", text="?")
    ticket = Ticket(
        index=index, prompt=prompt, num_trajectories=2, seed=0, policy_version=0, sampling=SamplingConfig(max_tokens=1)
    )
    await groups.add(ticket, Group(pieces=(), summary=judged("p", (1.0, 1.0))))
    assert not buffer.is_live(index) and known.of_step(1) == {"p": 1.0}


class Numbers:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return Prompt(prompt_id=str(index), text="?")


def office(known, seed=3, source=None, **more):
    settings = {"trajectories_per_group": 1, "sampling": SamplingConfig(max_tokens=1), **more}
    return TicketOffice(source=Mixture.of(source or Numbers()), seed=seed, pass_rates=known, **settings)


async def test_no_prompt_is_chosen_before_the_rates_that_choose_it_are_known():
    desk = office(rates(), num_ahead=4, thread=InlineExecutor())
    await desk.tickets([0], policy_version=0)
    assert desk.made_ahead([1], policy_version=0) is None


def test_prompts_are_sampled_in_proportion_to_their_preference():
    desk = office(rates((0, {"0": 0.5, "1": 0.75, "2": 0.0, "3": 1.0}), skip_solved_steps=1000))
    counts = Counter(desk.prompt(index).prompt_id for index in range(1600))
    assert counts["3"] == 0
    for prompt_id, share in (("0", 1 / 1.6), ("1", 0.5 / 1.6), ("2", 0.1 / 1.6)):
        assert counts[prompt_id] == pytest.approx(1600 * share, abs=90), "three standard deviations, at most"


def test_where_every_prompt_is_solved_the_epoch_goes_on():
    solved = rates((0, dict.fromkeys("0123", 1.0)), skip_solved_steps=1000)
    plain = office(None)
    assert [office(solved).prompt(index) for index in range(8)] == [plain.prompt(index) for index in range(8)]


def test_the_only_prompt_that_does_not_rest_is_found_where_a_thousand_draws_miss_it():
    class Many(Numbers):
        def __len__(self):
            return 50_000

    solved = {str(number): 1.0 for number in range(50_000) if number != 7}
    desk = office(rates((0, solved), skip_solved_steps=1_000_000), source=Many())
    assert [desk.prompt(index).prompt_id for index in (0, 1)] == ["7", "7"]


def test_a_prompt_that_is_passed_over_is_not_made_again_and_none_was_skipped_where_all_rest():
    made = []

    class Counted(Numbers):
        def __getitem__(self, index):
            made.append(index)
            return super().__getitem__(index)

    solved = rates((0, dict.fromkeys("0123", 1.0)), skip_solved_steps=1000)
    desk = office(solved, source=Counted())
    for index in range(8):
        desk.prompt(index)
    assert len(made) == 4 + 8, "each once to know its id, and one for every group"
    assert desk.drain_stats() == {}
    picky = office(rates((0, dict.fromkeys("012", 1.0)), skip_solved_steps=1000))
    assert picky.prompt(0).prompt_id == "3" and picky.drain_stats()["prompts/num_skipped"] == 2, "two draws before it"


def test_the_ledger_gives_a_resumed_run_the_same_prompts(tmp_path):
    """The first run deals and measures step by step; the second one begins at its record."""
    ledger = Ledger(RunDirectory(str(tmp_path)))
    first, chance = office(rates()), random.Random(0)
    dealt = []
    for step in range(20):
        for index in range(4 * step, 4 * step + 4):
            dealt.append(first.prompt(index).prompt_id)
            passed = chance.random() < int(dealt[-1]) / 3
            first.pass_rates.measure(index, judged(dealt[-1], (float(passed), 1.0)))
        ledger.append(
            groups=[4 * step + 3],
            trajectories="t",
            trajectories_digest="d",
            pass_rates=first.pass_rates.of_step(4 * step + 4),
        )
    again = Ledger(RunDirectory(str(tmp_path)))
    resumed = office(rates(*((record.next_index, record.pass_rates) for record in again.records())))
    assert [resumed.prompt(index).prompt_id for index in range(80)] == dealt
    assert dealt != [office(None).prompt(index).prompt_id for index in range(80)]
    assert resumed.prompt(80) == first.prompt(80)
    with pytest.raises(LedgerError):
        again.append(groups=[3], trajectories="t", trajectories_digest="d", pass_rates={})


def test_a_run_without_difficulty_writes_the_lines_that_it_always_wrote(tmp_path):
    record = Ledger(RunDirectory(str(tmp_path))).append(groups=[0], trajectories="t", trajectories_digest="d")
    assert record.line == (
        '{"step":1,"groups":[0],"next_index":1,"trajectories":"t","trajectories_digest":"d","previous":""}'
    )


def test_a_group_waits_for_the_step_that_chooses_its_prompt():
    """Steps of 2 and a bound of 1: group i knows the steps that end at i - 2 or before."""

    async def scene():
        buffer = Buffer(groups_per_step=2, max_off_policy_steps=1, prompts_depend_on_steps=True)
        assert list(buffer.start()) == [0, 1, 2, 3]
        for index in (1, 2):
            buffer.drop(index, reason="test")
        assert list(buffer.start()) == [4, 5], "step 1 ends at 4 or later: groups 4 and 5 do not know it"
        for index in (4, 5):
            buffer.drop(index, reason="test")
        assert list(buffer.start()) == [], "group 6 may know step 1, which may end at 4"
        for index in (0, 3):
            buffer.add(index, Group(pieces=(), summary=judged()))
        await buffer.take(2)
        assert list(buffer.start()) == []
        buffer.advance(1)
        assert list(buffer.start()) == [6, 7, 8, 9]

    run_simulated(scene())


def test_a_group_that_knows_no_step_that_is_being_learned_starts_meanwhile():
    """Steps of 2 and a bound of 1: group 3 needs no step that ends at 2, as the taken one does; group 4 does."""

    async def scene():
        buffer = Buffer(groups_per_step=2, max_off_policy_steps=1, prompts_depend_on_steps=True)
        buffer.start(limit=3)
        for index in (0, 1):
            buffer.add(index, Group(pieces=(), summary=judged()))
        await buffer.take(2)
        assert list(buffer.start()) == [3]
        buffer.drop(2, reason="test")
        assert list(buffer.start()) == []

    run_simulated(scene())


@pytest.mark.parametrize("is_held_back", [True, False])
def test_no_choice_depends_on_timing(is_held_back):
    """Whatever finishes and is dropped when: the steps that are learned as a group starts are those that the whole record shows it."""
    differing = 0

    async def scene(chance, bound, size):
        buffer = Buffer(
            groups_per_step=size,
            max_off_policy_steps=bound,
            prompts_depend_on_steps=is_held_back,
            max_dropped_steps=10**6,
        )
        ends, known, open_, version = [], {}, [], 0
        while version < 30:
            for index in buffer.start(chance.randint(1, 4)):
                known[index] = bisect_right(ends, index - bound * size)
                open_.append(index)
            if open_ and chance.random() < 0.8:
                index = open_.pop(chance.randrange(len(open_)))
                if chance.random() < 0.6:
                    buffer.drop(index, reason="test")
                else:
                    buffer.add(index, Group(pieces=(), summary=judged()))
            if buffer._is_ready(size):
                taken = await buffer.take(size)
                ends.append(taken[-1][0] + 1)
                version += 1
                for index in buffer.start(chance.randint(0, 2)):
                    is_recorded = chance.random() < 0.5
                    known[index] = bisect_right(ends if is_recorded else ends[:-1], index - bound * size)
                    open_.append(index)
                buffer.advance(version)
        return sum(known[index] != bisect_right(ends, index - bound * size) for index in known)

    for seed in range(20):
        chance = random.Random(seed)
        differing += asyncio.run(scene(chance, chance.randint(0, 3), chance.randint(1, 4)))
    assert (differing == 0) == is_held_back
