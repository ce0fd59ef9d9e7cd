"""What is judged is judged once, whatever becomes of the judge."""

import asyncio
import gc
import time
import weakref
from collections import Counter

import pytest

from cluster.contracts.errors import DeadlineError, LostError, UnavailableError, WorkerError
from cluster.contracts.types import Group, Hold, Progress, RewardFailure
from cluster.rollouts.buffer import Buffer
from cluster.rollouts.holds import Holds
from cluster.rollouts.scoring import FailedRewards
from cluster.rollouts.shared_calls import SharedCalls
from cluster.supervision.tasks import background
from tests.fakes import ListedEvents, NumberedPrompts, ScriptedScorer, actor_spec, death, group_summary
from tests.unit.cluster.rollouts.scene import EachTwice, Scene
from tests.unit.cluster.simulated_time import simulated


def sampled(index):
    return Group(pieces=(index,), summary=group_summary(index))


def _never(error):
    raise AssertionError(f"gives the service up: {error}")


@simulated
async def test_a_group_that_kills_the_reward_service_again_and_again_is_quarantined():
    def score(index):
        if index == 1:
            raise death("reward-0", "score")
        return group_summary(index, rewards=(1.0, 0.0))

    scene = Scene(score=score)
    assert await scene.take() == [0, 2, 3, 4]
    assert [event["group_id"] for event in scene.events.events if event["kind"] == "quarantine"] == ["00000001"]


@simulated
async def test_a_group_that_went_with_its_node_is_sampled_again():
    lost = iter([LostError("reward, 'score': its node is gone")])

    def score(index):
        if index == 1 and (error := next(lost, None)):
            raise error
        return group_summary(index, rewards=(1.0, 0.0))

    scene = Scene(score=score)
    assert await scene.take() == [0, 1, 2, 3]
    assert scene.workers[0].calls == [[0, 1, 2, 3], [1]] and scene.events.kinds() == ["groups_lost"]


@simulated
async def test_an_error_of_one_judging_blames_no_group_that_is_judged_beside_it():
    """Judging group 1 fails twice, and the service is replaced under the other three."""
    bugs = iter([WorkerError("reward failed in 'score': TypeError", actor="reward-0", stage="score")] * 2)
    judged = []

    class Scorer(ScriptedScorer):
        async def score_one(self, method, object_ref, *args, deadline_s):
            judged.append(object_ref)
            if object_ref == 1:
                await asyncio.sleep(1)
                if bug := next(bugs, None):
                    raise bug
                return self.columns(object_ref)
            return await super().score_one(method, object_ref, *args, deadline_s=deadline_s)

    scene = Scene(make_scorer=Scorer)
    scene.judging.clear()
    buffer = Buffer(groups_per_step=4)
    async with scene.generating(buffer):
        await asyncio.sleep(60)
        assert judged[8] == 1, "it is tried alone"
        assert sorted(judged[9:]) == [0, 2, 3], "then they are judged side by side"
        scene.judging.set()
        assert [index for index, _ in await buffer.take(4)] == [0, 1, 2, 3]


@simulated
async def test_prompts_that_were_judged_alone_without_harm_are_judged_side_by_side_when_they_come_again():
    """Two services die with all four groups, which are then tried one by one. The second step has the same four prompts."""
    dead, ended = [], []

    class Scorer(ScriptedScorer):
        async def score_one(self, method, object_ref, *args, deadline_s):
            await asyncio.sleep(1)
            if len(dead) < 2 and self not in dead:
                dead.append(self)
                raise death(self.name, "score")
            if len(dead) == 2 and self not in dead:
                ended.append(round(asyncio.get_running_loop().time()))
            return await super().score_one(method, object_ref, *args, deadline_s=deadline_s)

    scene = Scene(make_scorer=Scorer, prompts=NumberedPrompts(4))
    assert await scene.take(num_steps=2) == [*range(8)]
    first = ended[0]
    assert [second - first for second in ended] == [0, 1, 2, 3, 4, 4, 4, 4]


@simulated
async def test_a_group_whose_prompt_became_a_suspect_while_it_waited_for_a_service_is_judged_alone():
    """A heartbeat finds the service dead before group 0, which it was judging, hears of it. Group 1 has the same prompt."""
    scene = Scene()
    scene.judging.clear()
    async with scene.running():
        scorers, services = scene.production._scorers, scene.production.services
        killer, other = await scene.office.tickets(range(2), policy_version=0)
        scorers._suspects.blame([killer], death("reward-0", "score"), alone=False)
        judging = [asyncio.create_task(scorers.judge(killer, sampled(0)))]
        await asyncio.sleep(1)
        scene.coming.clear()
        services.replace(services.workers()[0], death("reward-0", "progress"))
        judging += [asyncio.create_task(scorers.judge(each, sampled(i))) for i, each in enumerate((killer, other), 1)]
        await asyncio.sleep(1)
        scene.coming.set()
        await asyncio.sleep(1)
        assert services.workers()[0].scored == [2]
        scene.judging.set()
        assert all(await asyncio.gather(*judging))


@simulated
async def test_a_group_that_comes_while_a_suspect_is_judged_waits_for_it():
    scene = Scene()
    scene.judging.clear()
    async with scene.running():
        scorers, (service,) = scene.production._scorers, scene.production.services.workers()
        killer, other = await scene.office.tickets(range(2), policy_version=0)
        for _ in range(2):
            scorers._suspects.blame([killer], death("reward-0", "score"), alone=False)
        judging = []
        for index, ticket in enumerate((killer, other)):
            judging.append(asyncio.create_task(scorers.judge(ticket, sampled(index))))
            await asyncio.sleep(1)
        assert service.scored == [0]
        scene.judging.set()
        assert all(await asyncio.gather(*judging))


@simulated
async def test_groups_go_together_and_a_slow_or_a_lost_one_of_them_keeps_no_other():
    """All come while the first is judged. One call takes the others along; group 1 takes a minute, group 2 went with its node."""
    calls, took = [], {}

    class Scorer(ScriptedScorer):
        async def call(self, method, asked, *refs, deadline_s):
            calls.append(refs)
            if 2 in refs and len(calls) < 5:
                raise LostError("reward-0, 'score_several': its node is gone")
            return await super().call(method, asked, *refs, deadline_s=deadline_s)

        async def score_one(self, method, object_ref, *args, deadline_s):
            await asyncio.sleep(50.0 if object_ref == 1 else 0.1)
            took[object_ref] = asyncio.get_running_loop().time() - began
            return await super().score_one(method, object_ref, *args, deadline_s=deadline_s)

    scene = Scene(make_scorer=Scorer)
    async with scene.running():
        began = asyncio.get_running_loop().time()
        judging = [
            asyncio.create_task(scene.production._scorers.judge(ticket, Group(pieces=(i,), summary=group_summary(i))))
            for i, ticket in enumerate(await scene.office.tickets(range(5), policy_version=0))
        ]
        judged = await asyncio.gather(*judging, return_exceptions=True)
    assert [type(each) for each in judged] == [Group, Group, LostError, Group, Group]
    assert calls[:6] == [(0, 1, 2, 3, 4), (0,), (1,), (2,), (3,), (4,)], (
        "none had begun: each goes alone, to see which is lost"
    )
    assert max(took[i] for i in (0, 3, 4)) < 2 < took[1]


@simulated
async def test_a_guilty_prompt_that_waits_to_be_judged_twice_is_not_judged_again():
    kills = []

    def score(index):
        if scene.office.prompt(index).prompt_id == "p1":
            kills.append(index)
            raise death("reward-0", "score")
        return group_summary(index, rewards=(1.0, 0.0))

    scene = Scene(score=score, prompts=EachTwice(4))
    assert len(await scene.take()) == 4
    assert kills == [1, 1, 3, 3], "twice in company, at last with both its groups, and once alone"
    assert scene.events.kinds().count("quarantine") == 1


@simulated
async def test_a_judge_that_fails_on_held_out_prompts_says_why():
    typo = RewardFailure(kind="KeyError", message="KeyError: 'anser'", count=1)
    failed = {"num_trajectories": 1, "rewards": (None,), "num_reward_errors": 1, "reward_failures": (typo,)}
    scene = Scene(score=lambda index: group_summary(index, **failed))
    async with scene.running():
        held_out = await scene.evaluate(2)
    assert len(held_out.summaries) == 2
    assert scene.events.kinds() == ["reward_failure"] * 2
    assert [event["message"] for event in scene.events.events if "message" in event] == [
        "prompt 'p-1': 1 of 1 rewards failed: KeyError: 'anser'"
    ]


def test_each_failure_is_an_event_and_the_first_sixteen_kinds_have_a_message():
    """A part may leave its recipe in a group without a failed reward, and a reward may fail without a reason."""
    events = ListedEvents()
    failed = FailedRewards(events)
    failed.note(group_summary(0, rewards=(1.0, 0.0)))
    failed.note(group_summary(1, num_reward_errors=1))
    for number in range(2, 22):
        failure = RewardFailure(kind=str(number), message="no reason", count=1)
        failed.note(group_summary(number, reward_failures=(failure,)))
    assert [int(event["group_id"]) for event in events.events] == [*range(1, 22)]
    assert sum("message" in event for event in events.events) == 16


@simulated
async def test_groups_are_dealt_over_the_reward_services_and_one_that_dies_stops_no_other():
    """Four groups, two for each; the second service dies with its first two, and the first goes on."""
    calls, died = [], []

    class Scorer(ScriptedScorer):
        async def score_one(self, method, object_ref, *args, deadline_s):
            calls.append((self.name, object_ref))
            await asyncio.sleep(1)
            if self.name == "reward-1" and len(died) < 2:
                died.append(object_ref)
                raise death(self.name, "score")
            return await super().score_one(method, object_ref, *args, deadline_s=deadline_s)

    scene = Scene(make_scorer=Scorer, num_services=2)
    assert await scene.take() == [0, 1, 2, 3]
    assert calls[:4] == [("reward-0", 0), ("reward-1", 1), ("reward-0", 2), ("reward-1", 3)]
    assert sorted(index for _, index in calls[4:]) == sorted(died) == [1, 3], "what the first had is judged once"
    assert [event["actor"] for event in scene.events.events if event["kind"] == "recovery"] == ["reward-1"]


@simulated
async def test_why_a_service_was_replaced_is_remembered_without_its_groups():
    """Its error's traceback held those of the call that it died in, until the next one died in its place."""

    class Piece:
        def __init__(self, index):
            self.index = index

    class Scorer(ScriptedScorer):
        async def call(self, method, asked, *pieces, deadline_s):
            if pieces and not died:
                died.append(self)
                raise death(self.name, method)
            return await super().call(method, asked, *pieces, deadline_s=deadline_s)

        async def score_one(self, method, piece, *args, deadline_s):
            return self.columns(piece.index)

    died, refs = [], []
    scene = Scene(make_scorer=Scorer)
    async with scene.running():
        for ticket in await scene.office.tickets(range(4), policy_version=0):
            refs.append(weakref.ref(piece := Piece(ticket.index)))
            group = Group(pieces=(piece,), summary=group_summary(ticket.index))
            assert await scene.production._scorers.judge(ticket, group)
            del piece, group
        (place,) = scene.production.services.places()
        gc.collect()
        assert place.failure_of(died[0]) is not None and [ref() for ref in refs] == [None] * 4


@simulated
async def test_a_service_whose_replacement_finds_no_node_keeps_none_of_its_groups_waiting():
    """Seen before: each group waited for the replacement of the service that it died with, while the other was idle."""
    died = asyncio.Event()

    class Scorer(ScriptedScorer):
        async def score_one(self, method, object_ref, *args, deadline_s):
            await asyncio.sleep(1)
            if self.name == "reward-1" and not died.is_set():
                died.set()
                scene.coming.clear()  # its node went: no other one starts
                raise death(self.name, "score")
            return await super().score_one(method, object_ref, *args, deadline_s=deadline_s)

    scene = Scene(make_scorer=Scorer, num_services=2)
    assert await scene.take() == [0, 1, 2, 3]
    assert died.is_set() and not scene.coming.is_set()


@simulated
async def test_groups_that_find_every_service_down_go_to_the_first_that_comes_up():
    """Seen before: all chose one of those that were down, and waited for that one."""
    calls, killed = [], set()

    class Scorer(ScriptedScorer):
        async def score_one(self, method, object_ref, *args, deadline_s):
            await asyncio.sleep(1)
            calls.append(self.name)
            if self.name not in killed:
                killed.add(self.name)
                if self.name == "reward-0":
                    scene.coming.clear()
                    asyncio.get_running_loop().call_later(60, scene.coming.set)
                raise death(self.name, "score")
            return await super().score_one(method, object_ref, *args, deadline_s=deadline_s)

    scene = Scene(make_scorer=Scorer, num_services=2)
    assert await scene.take() == [0, 1, 2, 3]
    assert killed == {"reward-0", "reward-1"}
    assert len(set(calls[-2:])) == 1, "two groups, together"


@simulated
@pytest.mark.parametrize("dies", [False, True])
async def test_a_service_that_joins_gets_groups_once_it_is_up_and_one_that_leaves_gets_none_and_is_not_replaced(dies):
    """Group 2 comes while the second service is still starting; 3 to 5 even the numbers out; 6 and 7 come once it is to leave."""
    judged = {"reward-0": [], "reward-1": []}

    class Scorer(ScriptedScorer):
        async def score_one(self, method, object_ref, *args, deadline_s):
            columns = await super().score_one(method, object_ref, *args, deadline_s=deadline_s)
            if dies and self.name == "reward-1":
                raise death(self.name, "score")
            judged[self.name].append(object_ref)
            return columns

    async def judge(*indices):
        for ticket in await scene.office.tickets(indices, policy_version=0):
            group = Group(pieces=(ticket.index,), summary=group_summary(ticket.index))
            judging.append(asyncio.create_task(scene.production._scorers.judge(ticket, group)))
        await asyncio.sleep(1)

    scene, judging = Scene(make_scorer=Scorer), []
    scene.judging.clear()
    async with scene.running():
        services = scene.production.services
        await judge(0, 1)
        scene.coming.clear()
        services.want(2)
        await judge(2)
        scene.coming.set()
        await asyncio.sleep(1)
        await judge(3, 4, 5)
        services.want(1)
        await judge(6, 7)
        assert [place.spec.name for place in scene.production.places()] == ["rollout-0", "reward-0", "reward-1"]
        assert [each["actor"] for each in scene.events.events] == ["reward-1"], "it joined, and has not left"
        scene.judging.set()
        assert all(await asyncio.gather(*judging))
        await asyncio.sleep(60)
        assert [place.spec.name for place in services.places()] == ["reward-0"]
        assert scene.production.drain_stats()["rollout/num_services"] == 1.0
    assert judged["reward-1"] == ([] if dies else [3, 4, 5])
    assert sorted(judged["reward-0"] + judged["reward-1"]) == [*range(8)]
    assert scene.events.kinds() == ["worker_joined", "worker_left"], "what leaves and dies is no failure of the run"


@simulated
async def test_an_outage_that_lasts_too_long_ends_the_run_and_is_no_services_or_prompts_failure():
    away = UnavailableError("reward.parts.style: http://judge:8000 is away", endpoint="http://judge:8000")

    def score(index):
        raise away

    scene = Scene(score=score)
    with pytest.raises(UnavailableError) as raised:
        await scene.take()
    assert raised.value is away
    assert not {"failure", "recovery", "quarantine", "drop"} & {*scene.events.kinds()}


@simulated
async def test_groups_that_wait_in_an_outage_hold_their_bytes_and_no_more_start_than_fit():
    """Room for 8 groups of 100 bytes; the bound alone would start 40. The outage ends, and all go on."""
    scene = Scene(max_concurrent_sequences=4)  # two groups at a time: the first tell how large a group is
    scene.judging.clear()
    buffer = Buffer(groups_per_step=4, max_off_policy_steps=9, max_size_bytes=800)
    async with scene.generating(buffer):
        await asyncio.sleep(50)
        assert buffer.size_bytes == 800 and buffer.next_index == 8
        scene.judging.set()
        assert [index for index, _ in await buffer.take(4)] == [0, 1, 2, 3]


@simulated
async def test_a_part_that_holds_is_told_of_once_and_its_seconds_are_counted(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1000.0 + asyncio.get_running_loop().time())
    events = ListedEvents()
    holds = Holds(events)
    away = Hold(part="style", endpoint="http://judge:8000", since=1000.0 - 12, reason="connection refused")
    for now in ([], [away], [away, away], [away]):
        holds.note(now)
        await asyncio.sleep(5)
    assert holds.drain() == {"time/style/held_s": 15.0}
    await asyncio.sleep(5)
    holds.note([])
    assert holds.drain() == {"time/style/held_s": 5.0} and holds.drain() == {}
    held, resumed = events.events
    assert (held["kind"], held["endpoint"]) == ("reward_held", "http://judge:8000")
    assert held["message"] == (
        "the part 'style' of the reward waits for http://judge:8000, which is away: connection refused"
    )
    assert resumed["message"] == "the part 'style' of the reward goes on: http://judge:8000 is back after 37 s"


@simulated
async def test_a_group_waits_for_a_reward_model_that_died_and_its_scores_travel_to_the_service():
    """Two models, of which one scores the second group and dies of it once; the service gets every group once, with both scores."""
    given, deaths = {}, iter([death("reward-model-kind", "score")])

    class Scorer(ScriptedScorer):
        async def call(self, method, object_ref, *refs, deadline_s):
            if method == "score_several":
                return await super().call(method, object_ref, *refs, deadline_s=deadline_s)
            if self.name == "reward-model-kind" and object_ref == 1 and (error := next(deaths, None)):
                raise error
            return [{"LABEL_0": float(object_ref)}, f"{deadline_s:g} s"]

        async def score_one(self, method, object_ref, scores, *, deadline_s):
            assert object_ref not in given
            given[object_ref] = scores
            return await super().score_one(method, object_ref, deadline_s=deadline_s)

    judges = {name: {"judge": {"name": "reward_model", "model": name}} for name in ("kind", "right")}
    models = {"kind": {"path": "a", "timeout_s": 7}, "right": {"path": "b", "timeout_s": 9}}
    scene = Scene(make_scorer=Scorer, reward={"parts": judges, "models": models})
    assert await scene.take() == [0, 1, 2, 3]
    assert scene.events.kinds() == ["failure", "recovery"]
    assert given[1] == [{"kind": {"LABEL_0": 1.0}, "right": {"LABEL_0": 1.0}}, {"kind": "7 s", "right": "9 s"}]


@simulated
async def test_the_deadline_of_a_reward_model_counts_a_groups_own_scores_and_not_its_wait_for_the_others():
    """Four groups of 5 seconds each, under a deadline of 7."""
    busy = asyncio.Lock()

    class Scorer(ScriptedScorer):
        async def call(self, method, object_ref, *refs, deadline_s):
            if method == "score_several":
                return await super().call(method, object_ref, *refs, deadline_s=deadline_s)
            try:
                async with asyncio.timeout(deadline_s), busy:
                    await asyncio.sleep(5)
            except TimeoutError:
                raise DeadlineError("'score' took too long", actor=self.name, stage="score") from None
            return [{"LABEL_0": 1.0}] * 2

    judge = {"name": "reward_model", "model": "kind"}
    scene = Scene(make_scorer=Scorer, reward={"judge": judge, "models": {"kind": {"path": "a", "timeout_s": 7}}})
    assert await scene.take() == [0, 1, 2, 3]
    assert scene.events.kinds() == []


@simulated
async def test_a_guilty_prompt_costs_no_reward_model_another_call():
    asked = []

    class Scorer(ScriptedScorer):
        async def call(self, method, object_ref, *refs, deadline_s):
            if method == "score_several":
                return await super().call(method, object_ref, *refs, deadline_s=deadline_s)
            asked.append(object_ref)
            return [{"LABEL_0": 1.0}] * 2

    judge = {"name": "reward_model", "model": "kind"}
    scene = Scene(make_scorer=Scorer, reward={"judge": judge, "models": {"kind": {"path": "a"}}})
    async with scene.running():
        (ticket,) = await scene.office.tickets(range(1), policy_version=0)
        scorers = scene.production._scorers
        for _ in range(3):
            scorers._suspects.blame([ticket], death("reward-0", "score"), alone=True)
        assert await scorers.judge(ticket, Group(pieces=(0,), summary=group_summary(0))) is None
    assert asked == []


@simulated
async def test_a_service_whose_groups_wait_hears_that_a_judge_server_moved():
    """The server moves at second 1; the group's judging ends when the service has heard of it."""
    urls, told, moved = {"grader": ["http://old"]}, [], asyncio.Event()

    class Servers:
        def urls(self):
            return dict(urls)

    class Scorer(ScriptedScorer):
        async def call(self, method, given, *refs, deadline_s):
            if method != "note_servers":
                return await super().call(method, given, *refs, deadline_s=deadline_s)
            told.append(given["grader"])
            if len(told) == 2:
                moved.set()

        async def score_one(self, method, object_ref, *given, deadline_s):
            await moved.wait()
            return await super().score_one(method, object_ref, *given, deadline_s=deadline_s)

    async with background() as tasks:
        scorer = Scorer(actor_spec("reward-0"), group_summary)
        calls = SharedCalls(scorer, tasks=tasks, deadline_s=60, give_up=_never, servers=Servers())
        scoring = asyncio.create_task(calls.score(Group(pieces=(0,), summary=group_summary(0)), ()))
        await asyncio.sleep(1)
        urls["grader"] = ["http://new"]
        await scoring
    assert told == [["http://old"], ["http://new"]]


@simulated
@pytest.mark.parametrize(
    ("dies_in", "outcomes"), [("note_servers", [None, None, None]), ("the third call", ["judged", WorkerError, None])]
)
async def test_of_a_services_death_hears_no_group_that_did_not_go_there(dies_in, outcomes):
    """All three go with one call, and one of them seems lost. Seen before: those that were to go next were blamed for the death, and what
    was judged by then was judged again."""

    class Servers:
        def urls(self):
            return {"grader": ["http://here"]}

    class Scorer(ScriptedScorer):
        num_calls = 0

        async def call(self, method, given, *refs, deadline_s):
            self.num_calls += method == "score_several"
            if method == dies_in or self.num_calls == 3:
                raise death("reward-0", method)
            if self.num_calls == 1:
                raise LostError("reward, 'score': its node is gone")
            return None if method == "note_servers" else await super().call(method, given, *refs, deadline_s=deadline_s)

    given_up = []
    async with background() as tasks:
        calls = SharedCalls(
            Scorer(actor_spec("reward-0"), group_summary),
            tasks=tasks,
            deadline_s=60,
            give_up=lambda error: given_up.append(error.stage),
            servers=Servers(),
        )
        groups = [Group(pieces=(index,), summary=group_summary(index)) for index in range(3)]
        found = await asyncio.gather(*(calls.score(group, ()) for group in groups), return_exceptions=True)
    told = [each if each is None else type(each) if isinstance(each, WorkerError) else "judged" for each in found]
    assert told == outcomes
    assert given_up == ([dies_in] if dies_in == "note_servers" else []), "else a group that went there gives it up"


@simulated
async def test_a_service_that_dies_as_it_hears_of_a_server_is_replaced_at_once():
    """Seen in review: its groups came back to it without a pause, until the next heartbeat found it dead."""
    num_told = Counter()

    class Servers:
        def places(self):
            return []

        def urls(self):
            return {"grader": ["http://here"]}

    class Scorer(ScriptedScorer):
        async def call(self, method, given, *refs, deadline_s):
            if method != "note_servers":
                return await super().call(method, given, *refs, deadline_s=deadline_s)
            num_told[self] += 1
            assert num_told[self] == 1, "it is asked again, though it is dead"
            if len(num_told) == 1:
                raise death(self.name, method)

    scene = Scene(make_scorer=Scorer)
    buffer = Buffer(groups_per_step=4)
    async with scene.running():
        scene.production._scorers._servers = Servers()
        async with scene.production.generating(into=buffer):
            assert [index for index, _ in await buffer.take(4)] == [0, 1, 2, 3]
    assert scene.events.kinds() == ["failure", "recovery"]


@simulated
async def test_a_group_whose_deadline_passes_before_it_is_sent_is_not_sent_later():
    """Group 1 comes while the call of group 0 is under way, which takes longer than both may."""
    sent = []

    class Scorer(ScriptedScorer):
        async def call(self, method, asked, *refs, deadline_s):
            sent.append(refs)
            await asyncio.sleep(100)
            return []

    async with background() as tasks:
        calls = SharedCalls(Scorer(actor_spec("reward-0"), group_summary), tasks=tasks, deadline_s=60, give_up=_never)
        for index, seconds in enumerate((0, 20, 180)):
            await asyncio.sleep(seconds)
            tasks.create_task(late(calls, index))
        await asyncio.sleep(200)
    assert sent == [(0,), (2,)]


async def late(calls, index):
    with pytest.raises(DeadlineError):
        await calls.score(sampled(index), ())


@simulated
async def test_a_group_that_outlasts_its_deadline_says_what_its_service_does():
    scorer = ScriptedScorer(actor_spec("reward-0"), group_summary, gate=asyncio.Event())
    scorer.last_progress = Progress(
        actor="reward-0",
        phase="holding",
        policy_version=0,
        since=0,
        last_progress=time.time(),
        pid=7,
        detail="style waits for http://judge",
    )
    async with background() as tasks:
        calls = SharedCalls(scorer, tasks=tasks, deadline_s=60, give_up=_never)
        with pytest.raises(DeadlineError, match=r"within 60 s; it is in phase 'holding'.*style waits for http://judge"):
            await calls.score(Group(pieces=(0,), summary=group_summary(0)), ())
