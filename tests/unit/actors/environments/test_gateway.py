"""The conversation as an OpenAI endpoint, in real host processes, with OpenAI's own client."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import psutil
import pytest

from actors.environments.host.gateway.refusals import RefusedError
from actors.environments.host.gateway.requests import read_raw_request
from cluster.contracts.episodes import Asked, EpisodeEnd, Logged, Rewritten, Said, ToolCall
from cluster.contracts.errors import DataError, EpisodeOver, Limit, TooLongError
from cluster.contracts.types import FinishReason, RewardStatus
from tests.unit.actors.environments.scripted import Scripted, Silent, calls, hosted, overrun, started, task
from tests.unit.actors.environments.test_failures import until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]  # environments are processes

HERE = "tests.unit.actors.environments.agents"
AGENT = f"{HERE}:agent"
both_kinds = pytest.mark.parametrize("kind", ["", "_blocking"])
PROMPT = {"role": "user", "content": "Guess."}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def logged(end: EpisodeEnd) -> list[Any]:
    return [event.value for event in end.events if isinstance(event, Logged)]


def connections(process: psutil.Process) -> list[Any]:
    return [each for each in process.net_connections() if each.status == psutil.CONN_ESTABLISHED]


def listening() -> set[int | None]:
    """Processes with a port that listens."""
    return {each.pid for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN}


@pytest.fixture
def after(shared):
    """What requests with these messages, or these requests, are answered: a text, or [status, error]."""

    async def answers(model: Any, *requests: Any, sampling: Any = None) -> list[Any]:
        bodies = [request if isinstance(request, dict) else {"messages": request} for request in requests]
        one = replace(task("say", requests=bodies), sampling=sampling or {})
        heard: list[Any] = []

        async def converse(asked: Asked) -> Said:
            heard.extend(event.value for event in asked.events if hasattr(event, "value"))
            events = tuple(event for event in asked.events if not hasattr(event, "value"))
            return await model(replace(asked, events=events))

        host = await shared(AGENT)
        end = await host.run(one, converse)
        assert end.status is RewardStatus.OK, end.message
        return [json.loads(each) for each in [*heard, *logged(end)]]

    return answers


@both_kinds
async def test_an_agent_asks_what_an_environment_asks(kind, shared):
    ends, asked = [], []
    for environment in (f"guess{kind}", f"{HERE}:guess{kind}"):
        model = Scripted("10", "no idea", "13")
        host = await shared(environment)
        ends.append(await host.run(task(seed=0), model))
        asked.append(model.asked)
    assert ends == [EpisodeEnd(reward=0.8)] * 2
    assert asked[0] == asked[1]
    assert [each.messages for each in asked[1]] == [(), (user("higher"),), (user("?"),)]


async def test_the_first_request_may_add_to_the_prompt(after):
    model = Scripted()
    await after(model, [PROMPT, user("Now.")])
    assert model.asked == [Asked(messages=(user("Now."),))]


async def test_an_agent_with_a_prompt_of_its_own_rewrites_the_context_first(after):
    model = Scripted()
    await after(model, [{"role": "developer", "content": "Be brief."}, PROMPT])
    context = ({"role": "system", "content": "Be brief."}, PROMPT)
    assert model.asked == [Asked(events=(Rewritten(messages=context),))]


@pytest.mark.parametrize(
    "history",
    [
        [PROMPT, said("onE"), user("Go on.")],
        [PROMPT, user("Go on.")],
        [PROMPT],
        [PROMPT, said("one"), said("and two"), user("Go on.")],
        [PROMPT, said("one")],
    ],
    ids=["edited", "shortened", "asked again", "an answer of its own", "no more than before"],
)
async def test_another_history_rewrites_the_context(history, after):
    model = Scripted("one")
    await after(model, [PROMPT], history)
    assert model.asked[1:] == [Asked(events=(Rewritten(messages=tuple(history)),))]


async def test_after_a_rewrite_the_conversation_goes_on(after):
    model = Scripted("one", "two")
    edited = [PROMPT, said("ONE"), user("Go on.")]
    await after(model, [PROMPT], edited, [*edited, said("two"), user("Further.")])
    assert model.asked[2] == Asked(messages=(user("Further."),))


async def test_tools_that_the_context_does_not_show_begin_it_anew(after):
    """Seen in review: a graph with other tools at each node got 400, and advice that only an environment can follow."""
    add, find = ({"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "find"))
    histories = [[PROMPT]]
    for answer in ("one", "two", "three"):
        histories.append([*histories[-1], said(answer), user("Go on.")])
    requests = zip(histories, ([add], [find], [find], []), strict=True)
    model = Scripted("one", "two", "three")
    await after(model, *({"messages": history, "tools": tools} for history, tools in requests))
    assert model.asked == [
        Asked(tools=(add,)),
        Asked(events=(Rewritten(messages=tuple(histories[1])),), tools=(find,)),
        Asked(messages=(user("Go on."),), tools=(find,)),
        Asked(messages=(user("Go on."),)),
    ]


async def test_calls_go_out_with_ids_and_their_answers_come_in(shared):
    model = Scripted(calls("calculate", expression="12*12"), calls("calculate", expression="é", id="mine"), "140")

    async def converse(asked: Asked) -> Said:
        answer = await model(asked)
        return (
            replace(answer, tool_calls=(calls("calculate", expression="7", id="mine"),))
            if len(model.asked) == 2
            else answer
        )

    host = await shared(AGENT)
    end = await host.run(task("tools"), converse)
    assert end == EpisodeEnd(reward=140.0, num_calls=2)
    first, second, third = model.asked
    assert (first.events, first.messages) == ((), ())
    assert first.tools[0]["function"]["name"] == "calculate"
    assert second.messages == ({"role": "tool", "name": "calculate", "content": "144"},)  # the model's call has no id
    assert third.messages == ({"role": "tool", "name": "calculate", "content": "7", "tool_call_id": "mine"},)
    assert second.events == third.events == ()


async def test_spaces_in_arguments_and_other_ids_are_the_same_history(after):
    model = Scripted(calls("add", a=1, b=2))
    call = {"id": "other", "type": "function", "function": {"name": "add", "arguments": '{ "b":2,  "a" : 1}'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "other", "content": [{"type": "text", "text": "3"}]}
    await after(model, [PROMPT], [PROMPT, asked, result])
    expected = {"role": "tool", "name": "add", "content": "3", "tool_call_id": "other"}
    assert model.asked[1] == Asked(messages=(expected,))


async def test_a_malformed_call_goes_out_as_it_is_and_is_counted(shared):
    model = Scripted(ToolCall(name="add", arguments='{"a": '))
    host = await shared(AGENT)
    end = await host.run(task("say", requests=[{"messages": [PROMPT]}]), model)
    (call,) = json.loads(logged(end)[0])["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": '}
    assert (end.num_calls, end.num_malformed_calls) == (1, 1)


async def test_an_answer_has_usage_reasoning_and_a_finish_reason(after):
    cut = Said(text="o", finish_reason=FinishReason.LENGTH, num_tokens=3, num_context_tokens=10, reasoning="hm")
    (answer,) = await after(Scripted(cut), {"messages": [PROMPT], "model": "gpt", "max_tokens": 3, "stop": "\n"})
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    assert (answer["model"], answer["choices"][0]["finish_reason"]) == ("gpt", "length")
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "o", "reasoning_content": "hm"}


async def test_limits_of_a_request_go_to_the_model(after):
    model = Scripted()
    await after(model, {"messages": [PROMPT], "max_completion_tokens": 3, "stop": ["\n", "x"]})
    assert (model.asked[0].max_tokens, model.asked[0].stop) == (3, ("\n", "x"))


async def test_the_stop_text_that_ended_a_turn_is_left_out_and_the_agents_history_goes_on(after):
    model = Scripted(Said(text="Act: 1\nSeen:\n", ending="\nSeen:\n"))
    history = [PROMPT, said("Act: 1"), user("Seen: 2")]
    first, _ = await after(model, {"messages": [PROMPT], "stop": ["\nSeen:"]}, history)
    assert first["choices"][0]["message"]["content"] == "Act: 1"
    assert (model.asked[1].events, model.asked[1].messages) == ((), (user("Seen: 2"),))


async def test_a_stream_has_the_text_the_calls_the_end_and_the_usage(shared):
    one = calls("calculate", expression="1", id="a")
    answer = Said(text="Well.", tool_calls=(one,), num_tokens=2, num_context_tokens=5)
    host = await shared(AGENT)
    end = await host.run(task("stream"), Scripted(answer))
    text, call, last, usage = json.loads(logged(end)[0])
    assert text["choices"][0]["delta"] == {"role": "assistant", "content": "Well."}
    assert call["choices"][0]["delta"]["tool_calls"] == [
        {
            "index": 0,
            "id": "a",
            "type": "function",
            "function": {"name": "calculate", "arguments": '{"expression": "1"}'},
        }
    ]
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 2)


async def test_requests_of_one_episode_follow_one_another(shared):
    running = 0

    async def converse(asked: Asked) -> Said:
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(0.01)
        running -= 1
        last = asked.messages or asked.events[-1].messages
        return Said(text=last[-1]["content"])

    host = await shared(AGENT)
    end = await host.run(task("parallel"), converse)
    assert json.loads(logged(end)[0]) == ["0", "1", "2", "3"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.7}, "temperature"),
    ({"top_p": 0.9}, "top_p"),
    ({"n": 2}, "n"),
    ({"presence_penalty": 0.1}, "presence_penalty"),
    ({"frequency_penalty": 0.1}, "frequency_penalty"),
    ({"seed": 0}, "seed"),
    ({"logit_bias": {"1": 2}}, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logprobs": True}, "logprobs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"extra_body": {"guided_regex": "a"}}, "guided_regex"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({"stop": [""]}, "stop"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "function", "content": ""}]}, "messages[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content",
    ),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": 5}]}, "messages[0].tool_calls"),
]


async def test_what_the_rows_could_not_tell_is_refused_by_name(after):
    model = Scripted()
    answers = await after(model, *[{"messages": [PROMPT], **body} for body, _ in REFUSED])
    assert [(status, error["param"]) for status, error in answers] == [(400, param) for _, param in REFUSED]
    assert "temperature=0.7 differs from the run's 1" in answers[0][1]["message"]
    assert not model.asked


REFUSED_RAW: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.7}, "temperature"),
    ({"n": 2}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"echo": True}, "echo"),
    ({"suffix": "."}, "suffix"),
    ({"logprobs": 0}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"extra_body": {"messages": [PROMPT]}}, "messages"),
    ({"extra_body": {"skip_special_tokens": True}}, "skip_special_tokens"),
    ({"extra_body": {"return_token_ids": 1}}, "return_token_ids"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": None}, "prompt"),
]


async def test_of_a_raw_prompt_too_what_the_rows_could_not_tell_is_refused_by_name(after):
    model = Scripted()
    answers = await after(model, *[{"prompt": "a", **body} for body, _ in REFUSED_RAW])
    assert [(status, error["param"]) for status, error in answers] == [(400, param) for _, param in REFUSED_RAW]
    assert "one request for each prompt" in answers[10][1]["message"]
    assert not model.asked


async def test_half_a_character_is_no_prompt():
    with pytest.raises(RefusedError, match="must be a text"):
        read_raw_request(b'{"prompt": "\\ud83d"}', sampling={})


async def test_a_raw_prompt_is_a_text_or_ids(after):
    model = Scripted()
    await after(model, *({"prompt": prompt} for prompt in ("a", ["b"], [1, 2], [[3]])))
    assert [each.raw for each in model.asked] == ["a", "b", (1, 2), (3,)]
    assert model.asked[0] == Asked(raw="a")


async def test_an_answer_to_a_raw_prompt_has_its_text_a_finish_reason_and_usage(after):
    cut = Said(text="o", finish_reason=FinishReason.LENGTH, num_tokens=3, num_context_tokens=10)
    model = Scripted(cut)
    asked = {"prompt": "a", "model": "gpt", "max_tokens": 3, "stop": "\n", "echo": False, "n": 1}
    (answer,) = await after(model, asked)
    assert (answer["object"], answer["model"], answer["id"][:5]) == ("text_completion", "gpt", "cmpl-")
    assert answer["choices"] == [{"index": 0, "text": "o", "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    assert model.asked == [Asked(raw="a", max_tokens=3, stop=("\n",))]


async def test_token_ids_come_in_vllms_fields_where_they_are_asked_for(after):
    said = Said(text="o", num_tokens=1, num_context_tokens=3, prompt_token_ids=(5, 6), token_ids=(7,))
    model = Scripted(said)
    asked = {"prompt": "a", "extra_body": {"return_token_ids": True}}
    answer, pieces = await after(model, asked, {**asked, "stream": True})
    (choice,) = answer["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6], [7])
    assert model.asked == [Asked(raw="a", wants_token_ids=True)] * 2
    assert pieces[0]["choices"][0]["token_ids"] is None, "Scripted says `done`, and has no tokens"


async def test_a_stream_after_a_raw_prompt_is_one_piece_and_the_usage(after):
    said = Said(text="Well.", num_tokens=2, num_context_tokens=5)
    asked = {"prompt": "a", "stream": True}
    pieces, without = await after(Scripted(said), {**asked, "stream_options": {"include_usage": True}}, asked)
    text, usage = pieces
    assert text["choices"] == [{"index": 0, "text": "Well.", "logprobs": None, "finish_reason": "stop"}]
    assert (usage["choices"], usage["usage"]["total_tokens"], len(without)) == ([], 5, 1)


async def test_a_chat_after_a_raw_prompt_begins_anew_and_a_raw_prompt_after_a_chat_is_itself(after):
    model = Scripted("one", "two", "three", "four")
    chat = [PROMPT, said("one"), user("Go on.")]
    await after(model, [PROMPT], {"prompt": "a"}, chat, [*chat, said("three"), user("Further.")])
    assert model.asked == [
        Asked(),
        Asked(raw="a"),
        Asked(events=(Rewritten(messages=tuple(chat)),)),
        Asked(messages=(user("Further."),)),
    ]


async def test_an_environment_that_asks_after_a_raw_prompt_rewrites_first(shared):
    model = Scripted()
    host = await shared(AGENT)
    end = await host.run(task("ask after a raw prompt"), model)
    assert end.reward == 1.0
    assert model.asked[1] == Asked(
        events=(*model.asked[1].events[:1], Rewritten(messages=(PROMPT,))), messages=(user("Go on."),)
    )
    assert model.asked[1].events[0].value.startswith("the last turn had a raw prompt, which a message cannot follow")


async def test_a_raw_prompt_that_is_refused_or_meets_a_limit_is_the_agents_to_handle(after):
    model = Scripted(DataError("token id 9"), EpisodeOver("cut off", limit=Limit.TURN_LENGTH), "done")
    refused, over, answer = await after(model, {"prompt": [9]}, {"prompt": "a"}, {"prompt": "b"})
    assert (refused[0], refused[1]["param"], refused[1]["message"]) == (400, "prompt", "token id 9")
    assert (over[0], over[1]["code"]) == (400, "turn_length")
    assert answer["choices"][0]["text"] == "done"


async def test_raw_prompts_count_as_turns():
    async with hosted(AGENT, max_turns=2) as host:
        end = await host.run(task("say", requests=[{"prompt": "a"}] * 3), Scripted())
    assert json.loads(logged(end)[-1])[1]["code"] == "max_turns"


async def test_the_runs_own_sampling_may_be_named_and_no_other(after):
    same = {"messages": [PROMPT], "temperature": 0.7, "top_p": 1, "n": 1, "logprobs": False, "user": "x", "seed": None}
    default = {"messages": [PROMPT], "temperature": 1}
    answer, (status, error) = await after(Scripted(), same, default, sampling={"temperature": 0.7})
    assert answer["choices"][0]["message"]["content"] == "done"
    assert (status, error["param"]) == (400, "temperature")


async def test_messages_that_the_template_refuses_are_the_agents_to_handle(after):
    model = Scripted("one", DataError("no role 'user' twice"), "two")
    more = [PROMPT, said("one"), user("a"), user("b")]
    _, (status, error), answer = await after(model, [PROMPT], more, [PROMPT, said("one"), user("a")])
    assert (status, error["message"]) == (400, "no role 'user' twice")
    assert answer["choices"][0]["message"]["content"] == "two"
    assert model.asked[2] == Asked(messages=(user("a"),))


async def test_a_full_context_is_an_error_that_agents_know_and_may_answer(after):
    full = EpisodeOver("700 tokens are more than 512", limit=Limit.CONTEXT)
    (status, error), _ = await after(Scripted(full, "two"), [PROMPT, user("long")], [user("short")])
    assert (status, error["code"]) == (400, "context_length_exceeded")


async def test_messages_that_alone_do_not_fit_have_the_code_of_a_full_context(after):
    (status, error), _ = await after(
        Scripted(TooLongError("600 tokens"), "two"), [PROMPT, user("long")], [user("short")]
    )
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")


async def test_an_agent_that_fails_over_a_limit_is_truncated():
    async with hosted(AGENT, max_turns=3) as host:
        assert await host.run(task("for ever"), Scripted()) == EpisodeEnd(limit=Limit.TURNS)
        assert await host.run(task("until over"), Scripted()) == EpisodeEnd(reward=0.5)


@pytest.mark.parametrize(
    ("do", "expected"),
    [
        ("wrong key", ["invalid_api_key"]),
        ("key that is not UTF-8", ["401 invalid_api_key"]),
        ("models", ["policy"]),
        ("elsewhere", ["404 invalid_request_error"] * 2),
        ("responses", ["/responses: Not Found; there are /chat/completions, /completions and /models"]),
    ],
)
async def test_other_requests_are_answered_with_objects_that_clients_know(do, expected, shared):
    model = Scripted()
    host = await shared(AGENT)
    end = await host.run(task(do), model)
    assert (logged(end), model.asked) == (expected, [])


async def test_a_body_beyond_the_bound_is_refused(after):
    (answer,) = await after(Scripted(), {"messages": [PROMPT], "metadata": {"x": "y" * 17 * 2**20}})
    assert answer[0] == 413


async def test_the_endpoint_of_an_ended_episode_is_gone(shared):
    host = await shared(AGENT)
    await host.run(task("keep"), Scripted())
    end = await host.run(task("kept"), Scripted())
    assert logged(end) == ["410 episode_over"]


async def test_a_client_that_gives_up_takes_its_turn_back_and_the_episode_with_it(shared):
    host = await shared(AGENT)
    end = await host.run(task("give up"), Silent())
    assert logged(end) == ["410 episode_over"]


async def test_at_the_deadline_an_agent_is_cancelled():
    async with hosted(AGENT) as host:
        silent = Silent()
        end = await overrun(host.run(task("for ever"), silent), begun=silent.asked.wait())
        assert (end.reward, end.status, end.is_suspect) == (None, RewardStatus.TIMEOUT, False)
        assert await host.run(task("models"), Scripted()) == EpisodeEnd(
            reward=1.0, events=(Logged(name="model", value="policy"),)
        )


async def test_a_cancelled_episode_closes_its_connections():
    async with hosted(AGENT) as host:
        silent = Silent()
        await host.run(task("models"), Scripted())
        (process,) = started()
        await until(lambda: not connections(process))
        before = process.num_fds()
        running = asyncio.create_task(host.run(task("hang"), silent))
        await silent.asked.wait()
        assert len(connections(process)) == 2, "both ends of one"
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert silent.was_cancelled
        await until(lambda: process.num_fds() <= before)
    assert started() == []


async def test_fifty_agents_leave_no_descriptors_and_one_port():
    async with hosted(AGENT, max_turns=2) as host:
        before = await host.run(task("count descriptors"), Scripted())
        async with asyncio.TaskGroup() as tasks:
            for i in range(50):
                tasks.create_task(host.run(task("until over" if i % 2 else "for ever"), Scripted()))
        after = await host.run(task("count descriptors"), Scripted())
        (process,) = started()
        family = {process.pid, *(each.pid for each in process.children(recursive=True))}
        assert family & listening()
    assert before.components == after.components == {"ports": 1.0}
    assert after.reward <= before.reward + 4
    await until(lambda: not family & listening())


async def test_an_agent_that_never_closes_its_client_leaves_no_connection_of_the_servers():
    async with hosted(AGENT) as host:
        await host.run(task("count descriptors"), Scripted())
        for _ in range(5):
            await host.run(task("leave a client"), Scripted())
        (process,) = started()
        await until(lambda: not connections(process))


@both_kinds
async def test_an_agent_that_waits_ends_with_its_episode_and_its_process_goes_on(kind):
    async with hosted(f"{HERE}:guess{kind}") as host:
        (process,) = started()
        silent = Silent()
        running = asyncio.create_task(host.run(task(), silent))
        await silent.asked.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        silent = Silent()
        late = await overrun(host.run(task(), silent), begun=silent.asked.wait())
        assert (late.reward, late.status, late.is_suspect) == (None, RewardStatus.TIMEOUT, False)
        assert (await host.run(task(), Scripted("13"))).reward == 1.0
        assert started() == [process]
