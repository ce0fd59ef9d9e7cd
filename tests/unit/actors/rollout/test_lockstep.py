"""Rounds of turns, by hand: who asks, who waits, and what the engine gets at once."""

import asyncio

from actors.rollout.episodes.lockstep import AtOnce, Lockstep
from cluster.contracts.protocols import EngineRequest
from cluster.contracts.sampling_config import SamplingConfig


class Table:
    def __init__(self, num_places: int) -> None:
        self.rounds: list[list[str]] = []
        self.steps = Lockstep(num_places=num_places)
        self.playing: list[int] = []

    def _submit(self, requests) -> None:
        self.rounds.append([each.request_id for each in requests])

    async def seat(self, place: int, call: int = 1) -> None:
        await self.steps.enter((call, place))
        self.playing.append(place)

    def ask(self, place: int, turn: int, call: int = 1) -> None:
        self.steps.ask((call, place), request(f"{place}.{turn}"), self._submit)


def request(name: str) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_token_ids=[1], sampling=SamplingConfig(), seed=0)


async def seated(num_places: int, num_episodes: int) -> tuple[Table, list[asyncio.Task[None]]]:
    table = Table(num_places)
    tasks = [asyncio.create_task(table.seat(place)) for place in range(num_episodes)]
    await asyncio.sleep(0)
    return table, tasks


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_nobody_is_sampled_before_everybody_has_asked_and_then_all_are_in_order():
    table, _ = await seated(3, 3)
    await settled()
    assert table.playing == [0, 1, 2]
    for place in (0, 2, 1):
        assert table.rounds == []
        table.ask(place, 0)
    assert table.rounds == [["0.0", "1.0", "2.0"]]
    table.ask(2, 1)
    table.ask(0, 1)
    assert len(table.rounds) == 1
    table.ask(1, 1)
    assert table.rounds[1] == ["0.1", "1.1", "2.1"]


async def test_one_that_ends_is_waited_for_no_more():
    table, _ = await seated(2, 2)
    for place in (0, 1):
        await settled()
        table.ask(place, 0)
    table.ask(0, 1)
    table.steps.leave((1, 1))
    assert table.rounds == [["0.0", "1.0"], ["0.1"]]


async def test_places_that_become_free_are_taken_between_two_rounds():
    table, _ = await seated(1, 2)
    await settled()
    assert table.playing == [0]
    table.ask(0, 0)
    await settled()
    assert table.playing == [0] and table.rounds == [["0.0"]]
    table.steps.leave((1, 0))
    await settled()
    assert table.playing == [0, 1]


async def test_a_turn_that_is_given_up_is_not_sampled_and_holds_the_others_until_its_episode_ends():
    table, _ = await seated(2, 2)
    await settled()
    table.ask(0, 0)
    await settled()
    table.steps.withdraw((1, 0))
    table.ask(1, 0)
    assert table.rounds == []
    table.steps.leave((1, 0))
    assert table.rounds == [["1.0"]]


async def test_one_that_waits_for_its_place_can_be_cancelled():
    table, tasks = await seated(1, 3)
    await settled()
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    table.steps.leave((1, 0))
    await settled()
    assert table.playing == [0, 2]


async def test_a_later_call_begins_when_all_of_the_earlier_one_have_ended():
    table, _ = await seated(4, 2)
    later = asyncio.create_task(table.seat(7, call=2))
    await settled()
    assert table.playing == [0, 1]
    for place in (0, 1):
        table.ask(place, 0)
    table.steps.leave((1, 1))
    await settled()
    assert table.playing == [0, 1]
    table.steps.leave((1, 0))
    await later
    table.ask(7, 0, call=2)
    assert table.rounds == [["0.0", "1.0"], ["7.0"]]


async def test_places_are_given_in_order_whoever_came_first_or_went():
    table, _ = await seated(1, 1)
    await settled()
    tasks = {place: asyncio.create_task(table.seat(place)) for place in (3, 1, 2)}
    await settled()
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    table.steps.leave((1, 0))
    tasks[1] = asyncio.create_task(table.seat(1))
    await settled()
    assert table.playing == [0, 2]
    table.steps.leave((1, 2))
    await settled()
    table.steps.leave((1, 1))
    await settled()
    assert table.playing == [0, 2, 1, 3]


async def test_one_that_is_cancelled_as_it_gets_its_place_gives_it_to_the_next():
    table, tasks = await seated(1, 3)
    await settled()
    table.steps.leave((1, 0))
    tasks[1].cancel()
    await settled()
    assert table.playing == [0, 2] and tasks[1].cancelled()
    table.ask(2, 0)
    assert table.rounds == [["2.0"]]


async def test_one_that_ends_while_it_asks_is_not_sampled():
    table, _ = await seated(2, 2)
    await settled()
    table.ask(0, 0)
    table.steps.leave((1, 0))
    table.ask(1, 0)
    table.steps.leave((1, 1))
    assert table.rounds == [["1.0"]]


async def test_all_places_are_given_at_once_to_a_later_call():
    table, _ = await seated(2, 1)
    later = [asyncio.create_task(table.seat(place, call=2)) for place in (5, 6, 7)]
    await settled()
    assert table.playing == [0]
    table.steps.leave((1, 0))
    await settled()
    assert table.playing == [0, 5, 6] and not later[2].done()


async def test_without_rounds_each_turn_goes_at_once():
    rounds: list[list[str]] = []
    pace, submit = AtOnce(num_places=1), lambda requests: rounds.append([each.request_id for each in requests])
    await pace.enter((1, 0))
    pace.ask((1, 0), request("a"), submit)
    pace.ask((1, 1), request("b"), submit)
    pace.withdraw((1, 0))
    pace.leave((1, 0))
    assert rounds == [["a"], ["b"]]


async def test_without_rounds_too_no_more_play_than_there_are_places():
    pace, playing = AtOnce(num_places=2), []

    async def seat(place: int) -> None:
        await pace.enter((1, place))
        playing.append(place)

    tasks = [asyncio.create_task(seat(place)) for place in range(4)]
    await settled()
    assert playing == [0, 1]
    pace.leave((1, 1))
    await settled()
    assert playing == [0, 1, 2]
    tasks[3].cancel()
