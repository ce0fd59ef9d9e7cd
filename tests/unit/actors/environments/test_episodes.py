"""What an environment may say and ask, in real host processes."""

import pytest

from actors.environments.host.main import find_environment
from cluster.contracts.episodes import Earned, EpisodeEnd, Logged, Rewritten, Said, ToolCall
from cluster.contracts.errors import ConfigError, DataError, EpisodeOver, Limit
from cluster.contracts.plugins import Plugin
from cluster.contracts.types import FinishReason, RewardStatus
from tests.unit.actors.environments.scripted import HERE, Scripted, Silent, calls, hosted, task

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]  # environments are processes

both_kinds = pytest.mark.parametrize("kind", ["", "_blocking"])
PROMPT = {"role": "user", "content": "Guess."}


@both_kinds
async def test_an_environment_answers_until_it_has_its_reward(kind, shared):
    model = Scripted("10", "no idea", "13", "14")  # Random(0) draws 13 of 1 to 20
    host = await shared(f"guess{kind}")
    end = await host.run(task(seed=0), model)
    assert end == EpisodeEnd(reward=0.8)
    assert model.heard == ["higher", "?"]
    assert [asked.messages for asked in model.asked][:2] == [(), ({"role": "user", "content": "higher"},)]


async def test_parameters_come_from_the_configuration_and_are_converted():
    async with hosted("guess", params={"top": "1"}) as host:
        assert (await host.run(task(), Scripted("1"))).reward == 1.0


async def test_an_episode_knows_its_task():
    async with hosted("tells_facts") as host:
        end = await host.run(task("x", seed=7, id="run/3"), Scripted("well"))
    facts = ["run/3", "Guess.", [PROMPT], {"do": "x"}, 7, 0, (0, 0), (1, 10)]
    assert end.events == (Logged(name="facts", value=repr(facts)),)


async def test_what_happens_between_two_turns_travels_with_the_next_one_or_the_end_in_order():
    model = Scripted()
    async with hosted("with_all_events") as host:
        end = await host.run(task(), model)
    first, second, third = model.asked
    note = {"role": "user", "content": "The note says 7."}
    assert (first.events, first.messages) == ((), ())
    assert second.events == (
        Earned(reward=0.5, name="first"),
        Logged(name="note", value="remember 7"),
        Rewritten(messages=(PROMPT, note)),
    )
    assert second.messages == ()
    assert third.events == (Earned(reward=0.25, name=None),)
    assert (third.messages, third.max_tokens, third.stop) == (({"role": "user", "content": "And?"},), 3, ("\n",))
    assert end == EpisodeEnd(reward=None, events=(Logged(name="last", value=1.0),))


async def test_a_tool_is_called_until_the_model_calls_nothing(shared):
    model = Scripted(calls("calculate", expression="12*12", id="a"), calls("calculate", expression="144-4"), "140")
    host = await shared("with_calculator")
    end = await host.run(task(answer=140), model)
    assert end == EpisodeEnd(reward=1.0, events=(Logged(name="calls", value=2.0),), num_calls=2)
    assert model.asked[1].messages == ({"role": "tool", "name": "calculate", "content": "144", "tool_call_id": "a"},)
    assert model.asked[2].messages == ({"role": "tool", "name": "calculate", "content": "140"},)
    (schema,) = model.asked[2].tools
    assert schema["function"]["parameters"]["required"] == ["expression"]


async def test_mistakes_of_the_model_go_back_to_it_and_are_counted(shared):
    model = Scripted(
        calls("calculate", expresion="1"),
        calls("calc", expression="1"),
        ToolCall(name="calculate", arguments='{"expression": '),
        ToolCall(name="unreadable", arguments='{"name": "calculate"'),  # as it comes where there are several tools
        calls("calculate", expression="f(1)"),
        "1",
    )
    host = await shared("with_calculator")
    end = await host.run(task(answer=1), model)
    assert (end.reward, end.status, end.num_calls, end.num_malformed_calls) == (1.0, RewardStatus.OK, 5, 5)
    assert model.heard == [
        "error: wrong arguments of calculate: expression: Field required; expresion: Extra inputs are not permitted",
        "error: there is no tool 'calc'; there are: calculate",
        "error: the arguments of calculate must be a JSON object, not '{\"expression\": '",
        'error: a call must be a tool\'s name and a JSON object of arguments, not \'{"name": "calculate"\'; there are: calculate',
        "error: 'f(1)' is no arithmetic",
    ]


async def test_calls_of_one_turn_are_made_in_order_and_answered_together():
    both = Said(text="", tool_calls=(calls("search", query="a"), calls("search", query="b")))
    model = Scripted(both, calls("undo"), "done")
    async with hosted("with_session") as host:
        end = await host.run(task(), model)
    assert (end.reward, end.num_calls) == (1.0, 3)
    assert [len(asked.messages) for asked in model.asked] == [0, 2, 1]
    assert model.heard == ['{"query": "a", "number": 1}', '{"query": "b", "number": 2}', "b"]


@both_kinds
@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("slow", "timeout", "OverrunError: no answer within timeout_s=0.2"),
        ("slow_blocking", "timeout", "OverrunError: no answer within timeout_s=0.2"),
        ("broken", "error", "KeyError: 'page'"),
        ("exits", "error", "SystemExit: 3"),
        ("stops", "error", "StopIteration"),
        ("leaks", "error", "CancelledError"),
        ("unspeakable", "error", "neither text nor JSON"),
    ],
)
async def test_a_tools_failure_is_the_environments_and_final_although_it_is_caught(kind, name, status, message, shared):
    host = await shared(f"with_tools{kind}", cleanup_s=0.2)
    end = await host.run(task(), Scripted(calls(name)))
    assert (end.reward, end.status, end.failed_stage) == (None, status, f"tool:{name}")
    assert message in end.message
    assert (await host.run(task(), Scripted("four"))).reward == 4.0


@both_kinds
async def test_with_tell_a_tools_failure_goes_to_the_model(kind, shared):
    model = Scripted(calls("slow_and_tells"), calls("broken_and_tells"), "ok")
    host = await shared(f"with_tools{kind}")
    end = await host.run(task(), model)
    assert (end.reward, end.status) == (2.0, RewardStatus.OK)
    assert model.heard == ["error: OverrunError: no answer within timeout_s=0.2", "error: KeyError: 'page'"]


async def test_a_blocking_tool_runs_in_the_thread_of_a_blocking_environment_and_never_in_the_loops(shared):
    heard = {}
    for kind in ("", "_blocking"):
        model = Scripted(calls("where"))
        host = await shared(f"with_tools{kind}")
        await host.run(task(), model)
        (heard[kind],) = model.heard
    assert heard["_blocking"] == "MainThread"
    assert heard[""] != "MainThread"


@both_kinds
async def test_numbers_dicts_rewards_and_none_are_returned(kind, shared):
    host = await shared(f"obedient{kind}")
    ends = [await host.run(task(do), Scripted()) for do in ("none", "number", "dict", "reward")]
    assert ends == [
        EpisodeEnd(),
        EpisodeEnd(reward=1.0),
        EpisodeEnd(reward=0.5, components={"format": 1.0}),
        EpisodeEnd(reward=2.0, components={"style": 0.5}),
    ]


@both_kinds
async def test_anything_else_is_the_environments_failure_and_said(kind, shared):
    expected = {
        "nan": "returned a reward that is not finite: nan",
        "infinity": "returned a reward that is not finite: -inf",
        "text": "returned a reward of type str",
        "list": "returned a reward of type list",
        "no reward": "returned a dict without 'reward', with: style",
        "object": "returned a reward of type object",
        "much": "the environment sends",
        "failed reward": "the server is down",
    }
    host = await shared(f"obedient{kind}")
    for do, message in expected.items():
        end = await host.run(task(do), Scripted())
        assert (end.reward, end.status, end.failed_stage) == (None, RewardStatus.ERROR, "environment")
        assert message in end.message


@both_kinds
async def test_more_turns_than_allowed_end_an_episode_as_truncated_with_what_it_earned(kind, shared):
    model = Scripted()
    host = await shared(f"obedient{kind}", max_turns=3)
    end = await host.run(task("ask for ever"), model)
    assert end == EpisodeEnd(limit=Limit.TURNS)
    assert len(model.asked) == 3


async def test_a_full_context_ends_an_episode_as_truncated(shared):
    model = Scripted("one", EpisodeOver("700 tokens are more than 512", limit=Limit.CONTEXT))
    host = await shared("obedient")
    end = await host.run(task("ask for ever"), model)
    assert end == EpisodeEnd(limit=Limit.CONTEXT)


async def test_what_was_earned_before_a_limit_is_kept():
    model = Scripted()
    async with hosted("obedient", max_turns=1) as host:
        end = await host.run(task("earn, then ask for ever"), model)
    assert end == EpisodeEnd(limit=Limit.TURNS, events=(Earned(reward=0.25, name=None),))


async def test_a_limit_inside_a_task_group_is_a_limit(shared):
    host = await shared("obedient", max_turns=2)
    assert await host.run(task("ask in a group for ever"), Scripted()) == EpisodeEnd(limit=Limit.TURNS)


async def test_an_environment_that_catches_a_limit_returns_its_own_reward(shared):
    host = await shared("obedient", max_turns=2)
    assert await host.run(task("ask until over"), Scripted()) == EpisodeEnd(reward=0.5)


async def test_a_tool_loop_ends_at_the_limit_of_turns():
    model = Scripted(*[calls("calculate", expression="1")] * 9)
    async with hosted("with_calculator", max_turns=4) as host:
        end = await host.run(task(answer=1), model)
    assert (end.limit, end.num_calls, len(model.asked)) == (Limit.TURNS, 4, 4)


async def test_a_turn_that_was_cut_off_is_an_answer_like_others(shared):
    said = Said(text="12", finish_reason=FinishReason.LENGTH)
    host = await shared("guess")
    assert (await host.run(task(seed=0), Scripted(said, "13"))).reward == 0.9


async def test_messages_that_the_template_refuses_are_the_environments_failure(shared):
    host = await shared("guess")
    end = await host.run(task(), Scripted("1", DataError("no role 'user' twice")))
    assert (end.status, end.failed_stage) == (RewardStatus.ERROR, "environment")
    assert end.message == "DataError: no role 'user' twice"


async def test_what_else_the_models_side_raises_is_its_callers_and_the_environment_ends(tmp_path, shared):
    file = tmp_path / "file"
    host = await shared("obedient")
    with pytest.raises(ZeroDivisionError):
        await host.run(task("clean up", file=str(file)), Scripted(ZeroDivisionError()))
    assert file.read_text() == "clean"


@both_kinds
async def test_two_asks_at_once_are_refused(kind, shared):
    host = await shared(f"obedient{kind}")
    end = await host.run(task("ask twice at once"), Silent())
    assert (end.status, end.failed_stage) == (RewardStatus.ERROR, "environment")
    assert end.message == "RuntimeError: two tasks ask at once in episode 'e'; only one turn at a time is possible"


async def test_what_cannot_be_said_is_refused_where_it_is_said(shared):
    expected = {
        "earn first": "DataError: earn(1.0) before the first turn",
        "earn nan": "DataError: the environment returned a reward that is not finite: nan",
        "earn text": "DataError: the environment returned a reward of type str",
        "log infinity": "DataError: the environment returned a value of 'loss' that is not finite: inf",
        "rewrite with an image": "DataError: the content of a message must be text, not list: images are not supported",
        "ask with bytes": "DataError: a message of role 'user' is not JSON: Object of type bytes",
        "ask with half a character": "DataError: a message of role 'user' is not JSON: 'utf-8' codec can't encode",
        "ask without a role": "DataError: a message must be a text or a dict with a role, not {'content': 'x'}",
        "ask with two tools of one name": "ConfigError: two tools have the same name: slow, slow",
        "ask at length": "DataError: the environment sends 16777",
    }
    host = await shared("obedient")
    for do, message in expected.items():
        end = await host.run(task(do), Scripted())
        assert (end.reward, end.status, end.failed_stage) == (None, RewardStatus.ERROR, "environment")
        assert end.message.startswith(message)


async def test_an_ask_without_messages_goes_only_first(shared):
    host = await shared("obedient")
    end = await host.run(task("ask nothing"), Scripted())
    assert end.message.startswith("DataError: ask() has no messages after the model's last turn")


async def test_an_ended_episode_asks_nothing(shared):
    host = await shared("obedient")
    await host.run(task("ask after its end", id="first"), Scripted())
    end = await host.run(task("ask in an ended one"), Scripted())
    assert end.events == (Logged(name="refusal", value="episode 'first' has ended and cannot ask any more"),)


async def test_an_environment_sees_no_variables_but_those_that_are_named(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("SHOP_URL", "http://shop")
    async with hosted("obedient", env=("SHOP_URL",)) as host:
        seen = [
            (await host.run(task("environment", variable=name), Scripted())).reward for name in ("HF_TOKEN", "SHOP_URL")
        ]
    assert seen == [0.0, 1.0]


@pytest.mark.parametrize(
    ("environment", "params", "message"),
    [
        ("gues", {}, "does not import: .* has no 'gues'; did you mean 'guess'"),
        ("guess", {"tpo": 3}, "environment.tpo=3 is not a parameter of .*; it takes: top"),
        ("guess", {"top": "many"}, "environment.top='many' is not valid"),
        ("guess", {"episode": 1}, "environment.episode=1 is not a parameter"),
        ("cleans_up", {}, "needs file"),
        ("OfAClass", {}, "is a class; an environment is a function"),
        ("takes_nothing", {}, "does not take episode"),
    ],
)
async def test_what_is_no_environment_is_refused(environment, params, message):
    with pytest.raises(ConfigError, match=message):
        find_environment(Plugin(name=f"{HERE}:{environment}", params=params), field="environment")


async def test_a_refusal_reaches_the_caller_before_an_episode():
    with pytest.raises(ConfigError, match=r"environment\.top=.many. is not valid"):
        async with hosted("guess", params={"top": "many"}):
            pass
