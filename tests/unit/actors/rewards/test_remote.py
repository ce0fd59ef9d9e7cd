"""The judge `remote` against real servers: each dialect's requests and answers, batches, and every fault of a server."""

import asyncio
import itertools
import json
import ssl
import subprocess

import pytest
from aiohttp import web

from actors.reward_service.deadline import verdict_within
from actors.reward_service.judge_process import JudgeProcess
from actors.reward_service.judgement import find_judge, judge_async, timed_out
from actors.reward_service.service import Asked, RewardService
from cluster.contracts.errors import ConfigError, UnavailableError
from cluster.contracts.plugins import Plugin
from cluster.contracts.reward_config import RewardConfig
from tests.ports import free_ports
from tests.unit.actors.faulty_server import faulty_server
from tests.unit.actors.simulated_network import simulated

TURNS = [{"role": "user", "content": "2+2?"}]


def group(*completions, prompt="<s>2+2?</s>", columns=None):
    size = len(completions)
    columns = {"messages": TURNS, "answer": "4"} if columns is None else columns
    asked = columns.get("messages", TURNS)
    return {
        "prompts": [prompt] * size,
        "completions": [*completions],
        "all_messages": [[*asked, {"role": "assistant", "content": said}] for said in completions],
        "all_token_ids": [[7]] * size,
        "finish_reasons": ["stop"] * size,
        "seeds": [*range(size)],
        "columns": columns,
    }


def lengths(texts):
    return [float(len(text)) for text in texts]


SERVERS = {
    # dialect: (parameters, what a healthy server answers)
    "openrlhf": ({}, lambda body: {"rewards": lengths(body["query"]), "extra_logs": {}}),
    "lightrft": ({}, lambda body: {"rewards": lengths(body["queries"])}),
    "slime": ({}, lambda body: float(len(body["prompt"] + body["response"]))),
    "classify": (
        {"model": "rm", "text": "raw"},
        lambda body: {
            "data": [
                {"index": place, "probs": [0.0, length]}
                for place, length in reversed([*enumerate(lengths(body["input"]))])
            ],
            "usage": {"total_tokens": 9},
        },
    ),
    "native": (
        {},
        lambda body: {
            "groups": [
                [{"reward": float(len(each["prompt"] + each["completion"]))} for each in group["trajectories"]]
                for group in body["groups"]
            ]
        },
    ),
}
every_dialect = pytest.mark.parametrize("dialect", SERVERS)


def remote(dialect, *urls, **params):
    own = {"endpoint": [*urls], "dialect": dialect} | SERVERS[dialect][0] | params
    return find_judge(Plugin(name="remote", params=own))


async def judged(judge, given, *, within_s=60.0):
    """Rewards; or "away" in an outage."""
    try:
        with verdict_within(within_s):
            return await asyncio.wait_for(judge_async(judge, given, size=len(given["prompts"])), within_s + 5)
    except UnavailableError:
        return "away"
    finally:
        await judge.call._client.close()


@every_dialect
async def test_each_dialect_gives_each_trajectory_its_own_reward(dialect):
    async with faulty_server(SERVERS[dialect][1]) as server:
        rewards = await judged(remote(dialect, server.url), group("4", "four", ""))
    assert [reward.value for reward in rewards] == [12.0, 15.0, 11.0]


@pytest.mark.parametrize(
    ("dialect", "params", "body"),
    [
        ("openrlhf", {}, {"query": ["<s>2+2?</s>4"], "prompts": ["<s>2+2?</s>"], "labels": ["4"]}),
        (
            "openrlhf",
            {"column": None, "text": "plain"},
            {"query": ["2+2?\n4"], "prompts": ["<s>2+2?</s>"], "labels": [None]},
        ),
        ("lightrft", {}, {"queries": ["<s>2+2?</s>4"], "prompts": ["<s>2+2?</s>"], "references": ["4"]}),
        ("lightrft", {"column": None}, {"queries": ["<s>2+2?</s>4"], "prompts": ["<s>2+2?</s>"]}),
        ("slime", {}, {"prompt": "<s>2+2?</s>", "response": "4", "label": "4"}),
        (
            "classify",
            {},
            {"model": "rm", "use_activation": False, "input": ["<s>2+2?</s>4"], "add_special_tokens": False},
        ),
        (
            "native",
            {},
            {
                "groups": [
                    {
                        "columns": {"messages": TURNS, "answer": "4"},
                        "trajectories": [
                            {
                                "prompt": "<s>2+2?</s>",
                                "completion": "4",
                                "token_ids": [7],
                                "finish_reason": "stop",
                                "seed": 0,
                            }
                        ],
                    }
                ]
            },
        ),
    ],
)
async def test_a_request_has_exactly_the_fields_that_its_server_reads(dialect, params, body):
    async with faulty_server(SERVERS[dialect][1]) as server:
        await judged(remote(dialect, server.url, **params), group("4"))
    assert server.requests == [body]


async def test_a_reward_model_behind_vllm_gets_the_messages_and_applies_its_own_template():
    def answer(body):
        return {"data": [{"index": 0, "probs": [float(len(body["messages"][-1]["content"]))]}]}

    columns = {"messages": TURNS}  # no label is needed where none is sent
    async with faulty_server(answer) as server:
        rewards = await judged(remote("classify", server.url, text="chat"), group("4", "four", columns=columns))
    assert [reward.value for reward in rewards] == [1.0, 4.0]
    assert server.requests[1]["messages"][1] == {"role": "assistant", "content": "four"}


def episode():
    """A group of one episode with a call, in the form of chat templates."""
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]
    given = group("4")
    given["all_messages"][0][1:1] = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "name": "add", "content": "four"},
    ]
    return given


async def test_a_reward_model_behind_vllm_gets_all_turns_of_an_episode_with_calls_in_the_form_of_its_api():
    async with faulty_server(lambda body: {"data": [{"index": 0, "probs": [1.0]}]}) as server:
        await judged(remote("classify", server.url, text="chat"), episode())
    asked, calling, told, said = server.requests[0]["messages"]
    assert (asked, told["content"], said) == (TURNS[0], "four", {"role": "assistant", "content": "4"})
    assert calling["tool_calls"] == [
        {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    ]


async def test_plain_text_has_the_contents_of_all_messages_of_an_episode():
    async with faulty_server(SERVERS["openrlhf"][1]) as server:
        await judged(remote("openrlhf", server.url, text="plain"), episode())
    assert server.requests[0]["query"] == ["2+2?\n\nfour\n4"]


@pytest.mark.parametrize(
    ("dialect", "answer", "values", "components"),
    [
        ("openrlhf", {"rewards": [1.0, 2.0], "scores": [0.5, 0.6]}, [1.0, 2.0], [{"score": 0.5}, {"score": 0.6}]),
        ("slime", {"score": 1, "acc": True, "reward": 0, "pred": "4"}, [1.0, 1.0], [{"acc": 1.0}] * 2),
        ("slime", {"reward": 1}, [1.0, 1.0], [{}, {}]),
        (
            "native",
            {"groups": [[{"reward": 1, "components": {"tidy": 0.5}}, {"status": "timeout", "error": "slow"}]]},
            [1.0, None],
            [{"tidy": 0.5}, {}],
        ),
    ],
)
async def test_components_and_failures_of_single_trajectories_come_through(dialect, answer, values, components):
    async with faulty_server(lambda body: answer) as server:
        rewards = await judged(remote(dialect, server.url), group("a", "b"))
    assert ([reward.value for reward in rewards], [reward.components for reward in rewards]) == (values, components)
    assert dialect != "native" or (rewards[1].status, rewards[1].message) == ("timeout", "slow")


@simulated
async def test_groups_judged_at_the_same_time_share_requests_and_get_their_own_rewards():
    async with faulty_server(SERVERS["openrlhf"][1]) as server:
        judge = remote("openrlhf", server.url, batch_size=4, batch_s=0.05)
        given = [group("a", "bb", "ccc", prompt=""), group("dddd", "eeeee", "ffffff", prompt="")]
        one, two = await asyncio.gather(*(judge_async(judge, each, size=3) for each in given))
        await judge.call._client.close()
    assert [len(body["query"]) for body in server.requests] == [4, 2]
    assert [reward.value for reward in (*one, *two)] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


@every_dialect
@simulated
async def test_a_limit_of_tokens_holds_for_servers_that_do_not_count_them(dialect):
    """Two requests of 12 characters are 4 tokens each: at 60 a minute the second one's turn comes in 4 s."""
    async with faulty_server(SERVERS[dialect][1]) as server:
        judge = remote(dialect, endpoint={"urls": [server.url], "tokens_per_minute": 60})
        asking = [judged(judge, group(said), within_s=3) for said in ("4", "5")]
        one, two = [await each for each in asking]
    assert (one[0].value, two, len(server.requests)) == (12.0, "away", 1)


async def test_a_trajectory_that_makes_the_server_refuse_its_batch_fails_alone():
    def answer(body):
        if "poison" in body["query"]:
            raise web.HTTPBadRequest(text="too long")
        return {"rewards": lengths(body["query"])}

    async with faulty_server(answer) as server:
        good, bad = await judged(remote("openrlhf", server.url), group("good", "poison", prompt=""))
    assert (good.value, bad.value) == (4.0, None)
    assert "HTTP 400: too long" in bad.message


@simulated
async def test_after_a_batch_that_breaks_its_server_each_trajectory_is_asked_for_alone():
    def answer(body):
        if "poison" in body["query"]:
            raise web.HTTPInternalServerError
        return {"rewards": lengths(body["query"])}

    async with faulty_server(answer) as server:
        judge = remote("openrlhf", server.url, batch_s=0.05)
        given = [group("good", prompt=""), group("poison", prompt="")]
        for others in ("away", 4.0):
            with verdict_within(3):
                asking = (judge_async(judge, each) for each in given)
                good, bad = await asyncio.gather(*asking, return_exceptions=True)
            assert isinstance(bad, UnavailableError)
            assert isinstance(good, UnavailableError) if others == "away" else good[0].value == others
        await judge.call._client.close()


@simulated
async def test_after_a_limit_a_batch_is_asked_for_together_again():
    """Alone, each of its trajectories would take a turn of the limit."""
    async with faulty_server(SERVERS["openrlhf"][1], "retry after 1 s") as server:
        judge = remote("openrlhf", server.url)
        with verdict_within(1.4), pytest.raises(UnavailableError):
            await judge_async(judge, group("a", "b"), size=2)
        await asyncio.sleep(1)
        rewards = await judged(judge, group("a", "b"))
    assert [reward.value for reward in rewards] == [12.0, 12.0]
    assert [len(body["query"]) for body in server.requests] == [2, 2]


def certificate(tmp_path):
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=127.0.0.1 "
    files = "-addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    subprocess.run(made + files, shell=True, check=True, capture_output=True, cwd=tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    return context


AWAY = ["429", "500", "close", "half a body", "hang", "slow drip", "retry after an hour"]
REFUSED = ["404", "malformed", "html", "redirect"]


@every_dialect
@pytest.mark.parametrize("fault", AWAY)
@simulated
async def test_a_server_that_is_away_gives_no_reward_at_all(dialect, fault):
    async with faulty_server(SERVERS[dialect][1], always=itertools.repeat(fault)) as server:
        assert await judged(remote(dialect, server.url), group("a", "b"), within_s=0.1) == "away"


@every_dialect
@pytest.mark.parametrize("fault", REFUSED)
async def test_a_server_that_refuses_fails_every_trajectory_and_is_never_a_zero(dialect, fault):
    async with faulty_server(SERVERS[dialect][1], always=itertools.repeat(fault)) as server:
        server.elsewhere = "http://127.0.0.2:9"
        rewards = await judged(remote(dialect, server.url), group("a", "b"))
    assert [(reward.value, reward.status) for reward in rewards] == [(None, "error")] * 2
    assert server.url in rewards[0].message


@every_dialect
@simulated
async def test_a_server_that_is_down_for_a_while_costs_time_and_no_reward(dialect):
    async with faulty_server(SERVERS[dialect][1], "503", "close", "half a body", "429") as server:
        rewards = await judged(remote(dialect, server.url), group("a", "b"))
    assert [reward.value for reward in rewards] == [12.0, 12.0]


@pytest.mark.parametrize(
    ("dialect", "answer", "message"),
    [
        ("openrlhf", {"rewards": [1.0]}, "1 rewards for 2 trajectories"),
        ("lightrft", {"rewards": [1.0, 2.0, 3.0]}, "3 rewards for 2 trajectories"),
        ("classify", {"data": []}, "0 rewards for 2 trajectories"),
        ("native", {"groups": [[{"reward": 1.0}]]}, "1 rewards for 2 trajectories"),
        ("openrlhf", {"scores": [1.0]}, "not an answer of dialect openrlhf"),
        ("lightrft", {"rewards": 1.0}, "not an answer of dialect lightrft"),
        ("classify", {"data": [{"index": 0, "probs": []}] * 2}, "not an answer of dialect classify"),
        ("classify", {"data": [{"index": 0, "probs": [1.0]}] * 2}, "not an answer of dialect classify"),
        ("classify", {"data": [{"index": i, "probs": [1.0]} for i in (1, 2)]}, "not an answer of dialect classify"),
        ("native", {"groups": [[{}, {}]]}, "not an answer of dialect native"),
        ("openrlhf", [1.0, 2.0], "not an answer of dialect openrlhf"),
        ("openrlhf", {"rewards": [float("nan"), float("inf")]}, "not finite"),
        ("slime", "good", "type str"),
        ("slime", {"error": "out of memory"}, "http://127.0.0.1"),
        (
            "slime",
            {"error": "out of memory", "code": 500},
            "not an answer of dialect slime (KeyError: 'reward'): {'error': 'out of",
        ),
        ("lightrft", {"rewards": [None, None]}, "the server answered null"),
        ("slime", None, "the server answered null"),
    ],
)
async def test_an_answer_that_does_not_fit_fails_every_trajectory_and_says_how(dialect, answer, message):
    async with faulty_server(lambda body: answer) as server:
        rewards = await judged(remote(dialect, server.url), group("a", "b"))
    assert [(reward.value, reward.status) for reward in rewards] == [(None, "error")] * 2
    assert message in rewards[0].message


async def test_an_unknown_certificate_is_an_outage_that_names_the_way_out_and_a_known_one_is_none(tmp_path):
    context = certificate(tmp_path)
    async with faulty_server(SERVERS["slime"][1], tls=context) as server:
        assert await judged(remote("slime", server.url), group("a")) == "away"
        trusting = {"urls": [server.url], "ca_file": str(tmp_path / "cert.pem")}
        (reward,) = await judged(remote("slime", endpoint=trusting), group("a"))
    assert reward.value == 12.0


class InProcess:
    """Judges as a judge's process does, in this one."""

    is_alive, is_spent = True, False

    def __init__(self, judge, *, timeout_s):
        self.facts, self._timeout_s = judge, timeout_s

    async def judge(self, shared, calls):
        ((size, given),) = calls
        try:
            with verdict_within(self._timeout_s):
                async with asyncio.timeout(self._timeout_s):
                    return [await judge_async(self.facts, json.loads(shared) | given, size=size)]
        except TimeoutError:
            return [[timed_out(self._timeout_s, setting="timeout_s")] * size]
        except UnavailableError as away:
            return [away]

    async def kill(self):
        await self.facts.call._client.close()


@pytest.fixture
def in_process(monkeypatch):
    async def start(part, config, *, printed):
        return InProcess(find_judge(part.judge), timeout_s=part.timeout_s)

    monkeypatch.setattr(JudgeProcess, "start", start)


def asked(*completions):
    given = {"prompt": "", "messages": [], "token_ids": [1], "finish_reason": "stop", "seed": 0}
    return Asked(columns={"answer": ""}, trajectories=[given | {"completion": said} for said in completions])


@simulated
async def test_a_service_holds_a_group_while_its_server_is_away_and_then_has_all_rewards(in_process):
    (port,) = free_ports(1)
    judge = {"name": "remote", "endpoint": f"http://127.0.0.1:{port}"}
    service = RewardService(RewardConfig(judge=judge, timeout_s=2, hold_s=60))
    judging = asyncio.create_task(service.judge(asked("a", "bb")))
    while service.progress().phase != "holding":
        await asyncio.sleep(0.5)
        assert not judging.done()
    async with faulty_server(SERVERS["native"][1], port=port):
        rewards, _ = await judging
    await service.close()
    assert [reward.value for reward in rewards] == [1.0, 2.0]


@simulated
async def test_completions_that_break_their_server_fail_though_nothing_else_is_asked_any_more(in_process):
    faults = {"crash": "500", "hang": "hang", "reset": "close"}
    async with faulty_server(SERVERS["slime"][1]) as server:
        server.fault_of = lambda body: faults.get(body["response"])
        judge = {"name": "remote", "endpoint": server.url, "dialect": "slime"}
        service = RewardService(RewardConfig(judge=judge, timeout_s=2, hold_s=60))
        await service.judge(asked("good"))
        judged = await asyncio.gather(*(service.judge(asked(said)) for said in faults))
        await service.close()
    rewards = [reward for (reward,), _ in judged]
    assert [(reward.value, reward.status) for reward in rewards] == [(None, "error")] * 3
    assert all("others were answered between 5 tries" in reward.message for reward in rewards)
    assert service.progress().phase == "idle"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"dialect": "slime", "text": "plain"}, "text=plain is not for dialect slime"),
        ({"dialect": "classify"}, "classify needs a model"),
        ({"dialect": "openrlhf", "model": "rm"}, "the others take none"),
        ({"dialect": "slime", "batch_size": 4}, "gets one trajectory a request here"),
        ({"endpoint": {"urls": ["http://a"], "key_env": "NOT_SET"}}, "name it in reward.env"),
        ({"endpoint": "http://me:secret@a"}, "user or password"),
    ],
)
def test_what_does_not_act_or_is_not_there_is_refused_when_the_judge_is_built(params, message):
    with pytest.raises(ConfigError, match=message):
        find_judge(Plugin(name="remote", params={"endpoint": "http://a"} | params))


async def test_plain_text_is_refused_where_the_messages_hold_more():
    image = {"messages": [{"role": "user", "content": [{"type": "image"}]}]}
    async with faulty_server(SERVERS["openrlhf"][1]) as server:
        judge = remote("openrlhf", server.url, text="plain", column=None)
        (reward,) = await judged(judge, group("a", columns=image))
    assert reward.value is None and "use raw" in reward.message


@simulated
async def test_a_group_whose_deadline_passes_leaves_nothing_running():
    async with faulty_server(SERVERS["openrlhf"][1], "hang") as server:
        judge = remote("openrlhf", endpoint={"urls": [server.url], "max_concurrency": 1})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await judge_async(judge, group("a", "b"), size=2)
        assert len(server.requests) == 1
        await asyncio.sleep(0.1)
        assert not judge.call._client._places.locked(), "the request is answered after 60 s"
        await judge.call._client.close()
