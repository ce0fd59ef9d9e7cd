"""The client of remote judges, against real servers that fail in every way."""

import asyncio
import contextlib
import itertools

import pytest

from actors.http import Endpoint, HttpClient, HttpError
from actors.reward_service.deadline import remaining_s, verdict_within
from cluster.contracts.errors import ConfigError, DataError, UnavailableError
from cluster.contracts.plugins import REWARDS, Plugin, resolve
from tests.unit.actors.faulty_server import faulty_server
from tests.unit.actors.simulated_network import simulated


def echo(body):
    return {"said": body}


@contextlib.asynccontextmanager
async def client_of(*urls, **limits):
    client = HttpClient(Endpoint(urls=urls, **limits))
    try:
        yield client
    finally:
        await client.close()


@pytest.mark.parametrize(
    "fault",
    [
        "500",
        "503",
        "408",
        "429",
        "close",
        "half a body",
        "retry after 1 s",
        "retry after a date",
        "retry after a year beyond C's integers",
    ],
)
@simulated
async def test_a_failure_of_transport_is_tried_again_inside_the_deadline(fault):
    async with faulty_server(echo, fault) as server, client_of(server.url) as client:
        with verdict_within(5):
            assert await client.post("/judge", [1]) == {"said": [1]}
        assert server.requests == [[1], [1]]


@pytest.mark.parametrize("fault", ["500", "429", "close", "half a body", "retry after an hour", "hang", "slow drip"])
@simulated
async def test_an_outage_is_told_before_the_deadline_and_names_the_server(fault):
    async with faulty_server(echo, always=itertools.repeat(fault)) as server, client_of(server.url) as client:
        with verdict_within(0.3), pytest.raises(UnavailableError, match=r"127\.0\.0\.1") as told:
            await client.post("/judge", 1)
        assert told.value.endpoint == server.url


@simulated
async def test_a_request_that_waits_behind_one_that_hangs_is_in_the_outage_too():
    async with faulty_server(echo, "hang", "hang") as server, client_of(server.url, max_concurrency=1) as client:
        with verdict_within(0.3):
            asked = await asyncio.gather(*(client.post("", number) for number in range(2)), return_exceptions=True)
        assert [type(error) for error in asked] == [UnavailableError, UnavailableError]
        assert len(server.requests) == 1


@simulated
async def test_a_server_that_is_gone_is_away():
    async with client_of("http://127.0.0.1:9") as client:
        with verdict_within(0.2), pytest.raises(UnavailableError, match=r"127\.0\.0\.1:9"):
            await client.post("", 1)


@pytest.mark.parametrize(("fault", "status"), [("404", 404), ("422", 422), ("malformed", 200), ("html", 200)])
@simulated
async def test_what_a_server_means_is_an_error_at_once(fault, status):
    async with faulty_server(echo, always=itertools.repeat(fault)) as server, client_of(server.url) as client:
        with pytest.raises(DataError, match=f"{server.url}/judge: .*(out of order|rewards|It works)") as told:
            await client.post("/judge", 1)
        assert (told.value.status, len(server.requests)) == (status, 1)


@pytest.mark.parametrize("fault", ["503", "close", "hang"])
@simulated
async def test_requests_under_way_when_a_server_goes_away_are_in_the_outage_though_it_answered_one(fault):
    async with (
        faulty_server(echo, always=itertools.chain([None], itertools.repeat(fault))) as server,
        client_of(server.url) as client,
    ):
        with verdict_within(4):
            asking = (client.post("", number) for number in range(7))
            asked = await asyncio.gather(*asking, return_exceptions=True)
    assert sorted(type(each).__name__ for each in asked) == ["UnavailableError"] * 6 + ["dict"]


@simulated
async def test_a_second_request_that_is_still_unanswered_at_the_end_of_its_judgement_is_a_slow_judgement():
    async with faulty_server(echo, None, "hang") as server, client_of(server.url) as client:
        with verdict_within(4):
            await client.post("", "first")
            await asyncio.sleep(2.4)
            with pytest.raises(TimeoutError):
                await client.post("", "second")
            assert remaining_s() == 0.0, "the judge's own deadline comes first"


@pytest.mark.parametrize(("num_answered", "at_s"), [(0, 2.4), (1, 1.0)])
@simulated
async def test_a_first_request_or_one_in_the_first_half_of_its_judgement_is_in_the_outage(num_answered, at_s):
    async with faulty_server(echo, *[None] * num_answered, "hang") as server, client_of(server.url) as client:
        with verdict_within(4), pytest.raises(UnavailableError, match="answered nothing") as away:
            for number in range(num_answered):
                await client.post("", number)
            await asyncio.sleep(at_s)
            await client.post("", 9)
        assert away.value.endpoint == server.url


@pytest.mark.parametrize("fault", ["retry after 0 s", "retry after a past date"])
@simulated
async def test_a_server_that_may_be_asked_again_at_once_is_asked_with_jitter(fault):
    async with faulty_server(echo, *[fault] * 50) as server, client_of(server.url) as client:
        with verdict_within(0.6), pytest.raises(UnavailableError):
            await client.post("", 1)


@simulated
async def test_a_server_that_fails_is_asked_less_and_less_often(monkeypatch):
    """0.1, 0.2, 0.4 ... 6.4 and 10 s apart: at 0, 0.1, 0.3, 0.7, 1.5, 3.1, 6.3, 12.7 and 22.7 s of 29."""
    monkeypatch.setattr("actors.http.random.uniform", lambda low, high: high)
    async with faulty_server(echo, always=itertools.repeat("503")) as server, client_of(server.url) as client:
        with pytest.raises(UnavailableError):
            await client.post("", 1)
        assert len(server.requests) == 9


@simulated
async def test_of_servers_that_want_no_request_the_first_that_does_again_is_asked():
    async with (
        faulty_server(echo, "retry after an hour") as long,
        faulty_server(echo, "retry after 1 s") as short,
        client_of(long.url, short.url) as client,
    ):
        with verdict_within(5):
            assert await client.post("", 1) == {"said": 1}
        assert (len(long.requests), len(short.requests)) == (1, 2)


@simulated
async def test_a_server_that_limits_and_then_hangs_is_in_the_outage():
    async with faulty_server(echo, "retry after 1 s", "hang") as server, client_of(server.url) as client:
        with verdict_within(2), pytest.raises(UnavailableError, match="answered nothing") as away:
            await client.post("", 1)
        assert away.value.endpoint == server.url


@simulated
async def test_while_a_server_wants_no_request_none_is_sent_by_any_call():
    async with faulty_server(echo, "retry after an hour") as server, client_of(server.url) as client:
        for number in range(3):
            with verdict_within(5), pytest.raises(UnavailableError, match="HTTP 429") as limited:
                await client.post("", number)
            assert limited.value.retry_after_s == pytest.approx(60.0)
        assert server.requests == [0]


@contextlib.asynccontextmanager
async def limited_meanwhile(fault):
    """A server that has asked for an hour's rest, and an earlier request that ends by `fault` when the server's wait is set."""
    async with faulty_server(echo, fault, "retry after an hour") as server, client_of(server.url) as client:
        server.wait = asyncio.Event()
        earlier = asyncio.create_task(client.post("", 0))
        while not server.requests:
            await asyncio.sleep(0.01)
        with pytest.raises(UnavailableError, match="HTTP 429"):
            await client.post("", 1)
        yield server, earlier
        with verdict_within(0.3), pytest.raises(UnavailableError, match="HTTP 429"):
            await client.post("", 2)
        earlier.cancel()
        assert server.requests == [0, 1]


@simulated
async def test_a_limit_outlasts_the_late_answer_to_an_earlier_request():
    """Its answer ended the server's rest: calls then asked themselves thousands of times a second whether it is open."""
    async with limited_meanwhile("slow") as (server, earlier):
        server.wait.set()
        await earlier


@simulated
async def test_a_limit_outlasts_the_late_failure_of_an_earlier_request():
    """The failure, which names no time, opened the server again: eight calls asked it within three seconds."""
    async with limited_meanwhile("slow 500") as (server, _):
        server.wait.set()
        await asyncio.sleep(10)


@simulated
async def test_a_call_that_was_not_sent_while_a_server_is_away_is_no_try_of_it():
    """It counted as one: after five of them, and an answer to another request, the reward failed in an outage."""
    async with faulty_server(echo, "away for an hour") as server, client_of(server.url) as client:
        with verdict_within(5), pytest.raises(UnavailableError, match="HTTP 503") as sent:
            await client.post("", 0)
        with verdict_within(5), pytest.raises(UnavailableError, match="HTTP 503") as waits:
            await client.post("", 1)
        assert sent.value.retry_after_s is None and waits.value.retry_after_s == pytest.approx(60.0)
        assert server.requests == [0]


@simulated
async def test_an_outage_of_slow_failures_names_the_last_one():
    async with faulty_server(echo, "500", "hang") as server, client_of(server.url) as client:
        with (
            verdict_within(5),
            pytest.raises(UnavailableError, match=r"answered nothing for .* before that: HTTP 500: out of"),
        ):
            await client.post("", 0)


@simulated
async def test_requests_go_round_the_healthy_servers_and_return_to_one_that_has_rested(monkeypatch):
    monkeypatch.setattr("actors.http._REST_S", 2)
    async with faulty_server(echo, "503") as ill, faulty_server(echo) as well, client_of(ill.url, well.url) as client:
        began = asyncio.get_running_loop().time()
        for number in range(4):
            await client.post("", number)
        assert (ill.requests, well.requests) == ([0], [0, 1, 2, 3])
        assert asyncio.get_running_loop().time() == began, "the other one is asked at once"
        await asyncio.sleep(2)
        for number in (4, 5):
            await client.post("", number)
        assert (len(ill.requests), len(well.requests)) == (2, 5)


@simulated
async def test_a_server_that_hangs_rests_too():
    async with faulty_server(echo, "hang") as ill, faulty_server(echo) as well, client_of(ill.url, well.url) as client:
        with verdict_within(0.2), pytest.raises(UnavailableError):
            await client.post("", 0)
        assert [await client.post("", number) for number in (1, 2)] == [{"said": 1}, {"said": 2}]
        assert (ill.requests, well.requests) == ([0], [1, 2])


@simulated
async def test_the_token_travels_to_its_server_alone_and_stands_in_no_message(monkeypatch):
    monkeypatch.setenv("RM_KEY", "s3cret")
    async with faulty_server(echo, "redirect", "echo") as server, faulty_server(echo) as other:
        server.elsewhere = f"{other.url}/steal"
        async with client_of(server.url, key_env="RM_KEY") as client:
            with pytest.raises(HttpError, match="HTTP 307: redirects to"):
                await client.post("", 1)
            with pytest.raises(HttpError, match=r"HTTP 401: no such key: Bearer \*\*\*"):
                await client.post("", 1)
        assert (server.headers[0]["Authorization"], other.requests) == ("Bearer s3cret", [])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"key_env": "NOT_SET"}, "export it, and name it in reward.env"),
        ({"ca_file": "/nowhere.pem"}, "ca_file='/nowhere.pem' cannot be read"),
    ],
)
def test_what_is_not_there_is_one_clear_error_when_the_judge_is_built(params, message):
    with pytest.raises(ConfigError, match=message):
        HttpClient(Endpoint(urls=("http://a",), **params))


@pytest.mark.parametrize(
    "url", ["ftp://a", "localhost:5000", "http://", "http://me:pw@a", "http://a?x=1", "http://a:99999"]
)
def test_an_url_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match=r"must be a URL|has a user or password|[Pp]ort") as refused:
        Endpoint.model_validate(url)
    (error,) = refused.value.errors()
    assert "x=1" not in error["msg"] and "pw" not in error["msg"], "what may be a secret"


@pytest.mark.parametrize(
    ("judge", "field", "params"),
    [("code_sandbox_fusion", "url", {}), ("remote", "endpoint", {}), ("llm_judge", "endpoint", {"rubric": "a.yaml"})],
)
@pytest.mark.parametrize("endpoint", [{"urls": []}, {}])
def test_a_judge_without_a_server_is_refused_before_it_starts(endpoint, judge, field, params):
    """To ask none would be an outage, which the run waits for."""
    plugin = Plugin(name=judge, params={field: {**endpoint, "max_concurrency": 1}, **params})
    with pytest.raises(ConfigError, match=rf"reward\.judge\.{field}\.urls: (no server is named|Field required)"):
        resolve(plugin, home=REWARDS, field="reward.judge")


def test_a_path_is_put_behind_an_url_with_one_slash():
    assert Endpoint.model_validate("http://a/v1/").urls == ("http://a/v1",)


@simulated
async def test_an_answer_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("actors.http._MAX_ANSWER_BYTES", 1000)
    async with faulty_server(lambda body: "x" * body) as server, client_of(server.url) as client:
        assert len(await client.post("", 900)) == 900
        with pytest.raises(HttpError, match="more than 1000 bytes"):
            await client.post("", 1100)


@simulated
async def test_as_many_requests_go_out_at_a_time_as_allowed():
    """A client of aiohttp has a hundred connections where nothing else is said."""
    async with faulty_server(echo, always=itertools.repeat("hang")) as server:
        async with client_of(server.url, max_concurrency=120) as client:
            with verdict_within(3):
                await asyncio.gather(*(client.post("", number) for number in range(130)), return_exceptions=True)
        assert sorted(server.requests) == [*range(120)]


@simulated
async def test_limits_hold_on_concurrency_requests_and_tokens():
    now, under_way = asyncio.get_running_loop().time, []

    def answer(body):
        return {"usage": {"total_tokens": 30}}

    async with faulty_server(answer) as server:
        began = now()
        async with client_of(server.url, requests_per_minute=1200) as client:
            await asyncio.gather(*(client.post("", number) for number in range(5)))
        assert now() - began == pytest.approx(0.2)  # 1200 a minute: one each 0.05 s, the first at once
        async with client_of(server.url, tokens_per_minute=6000) as client:
            began = now()
            for _ in range(2):
                await client.post("", 0, num_tokens=10)
            # The first took 30 tokens and not 10: 0.3 s at 100 a second.
            assert now() - began == pytest.approx(0.3)
        async with client_of(server.url, requests_per_minute=1) as client:
            await client.post("", 0)
            with pytest.raises(UnavailableError, match=r"requests_per_minute .* no turn") as limited:
                await client.post("", 0)
            assert (limited.value.endpoint, limited.value.retry_after_s) == (None, pytest.approx(30.0))
        server.faults, server.requests, server.wait = itertools.repeat("slow"), under_way, asyncio.Event()
        async with client_of(server.url, max_concurrency=2) as client:
            asking = [asyncio.create_task(client.post("", number)) for number in range(5)]
            await asyncio.sleep(1)
            assert under_way == [0, 1]
            server.wait.set()
            await asyncio.gather(*asking)


@pytest.mark.parametrize("limit", [{"max_concurrency": 1}, {"requests_per_minute": 60 / 1.4}])
@simulated
async def test_a_request_that_the_limits_sent_out_late_says_nothing_of_the_server(limit):
    """Of 2 s the first has all, and is in the outage. The second goes out at 1.4 s, or not before its end."""
    async with faulty_server(echo, "hang", "hang") as server, client_of(server.url, **limit) as client:
        with verdict_within(3):
            asked = await asyncio.gather(*(client.post("", number) for number in range(2)), return_exceptions=True)
    assert [type(error) for error in asked] == [UnavailableError, UnavailableError]
    assert [(each.endpoint, each.retry_after_s is None) for each in asked] == [(server.url, True), (None, False)]
    assert "max_concurrency" in str(asked[1])


@simulated
async def test_of_a_burst_those_that_would_come_too_late_are_told_so_at_once():
    """One a second, for 2 s: the first go at 0 s and 1 s."""
    async with faulty_server(echo) as server, client_of(server.url, requests_per_minute=60) as client:
        began = asyncio.get_running_loop().time()
        with verdict_within(3):
            asked = await asyncio.gather(*(client.post("", number) for number in range(5)), return_exceptions=True)
        assert asyncio.get_running_loop().time() - began == pytest.approx(1.0)
    assert [getattr(each, "retry_after_s", None) for each in asked] == [None, None, *[pytest.approx(1.0)] * 3]


@simulated
async def test_tokens_that_were_not_used_let_the_next_request_go_earlier():
    """One token a second. Ten are expected and two are used, which is known after 1 s: the next goes at 2 s."""
    async with faulty_server(lambda body: {"usage": {"total_tokens": 2}}, "slow") as server:
        server.wait = asyncio.Event()
        async with client_of(server.url, tokens_per_minute=60) as client:
            began = asyncio.get_running_loop().time()
            asking = [asyncio.create_task(client.post("", number, num_tokens=10)) for number in range(2)]
            await asyncio.sleep(1)
            server.wait.set()
            await asyncio.gather(*asking)
            assert asyncio.get_running_loop().time() - began == pytest.approx(2.0, abs=0.06)


@simulated
async def test_a_request_that_is_given_up_before_its_turn_takes_none():
    """One a second: the turns of those that were given up would be 1 s, 2 s and 3 s after the first."""
    async with faulty_server(echo) as server, client_of(server.url, requests_per_minute=60) as client:
        waiting = [asyncio.create_task(client.post("", number)) for number in range(4)]
        await waiting[0]
        for each in waiting[1:]:
            each.cancel()
        await asyncio.wait(waiting)
        with verdict_within(3.5):
            assert await client.post("", 4) == {"said": 4}
        assert server.requests == [0, 4]


@simulated
async def test_a_late_request_that_waits_for_a_place_says_nothing_of_the_server():
    """As the second question of a judgement, whose first was answered late."""
    async with faulty_server(echo, "hang") as server, client_of(server.url, max_concurrency=1) as client:
        first = asyncio.create_task(client.post("", 0))
        with verdict_within(1.5), pytest.raises(UnavailableError, match="max_concurrency") as away:
            await asyncio.sleep(1)
            await client.post("", 1)
        assert away.value.endpoint is None
        first.cancel()
        await asyncio.wait([first])


@simulated
async def test_a_request_that_is_late_for_its_tokens_takes_no_turn_of_the_requests():
    limits = {"requests_per_minute": 60, "tokens_per_minute": 60}
    async with faulty_server(echo) as server, client_of(server.url, **limits) as client:
        with verdict_within(5):
            await client.post("", 0, num_tokens=100)
            next_at = client._requests._next_at
            for number in range(1, 4):
                with pytest.raises(UnavailableError, match="leave no turn"):
                    await client.post("", number, num_tokens=1)
        assert client._requests._next_at == next_at


@simulated
async def test_a_request_whose_tokens_come_too_late_once_it_has_its_turn_is_told_so_then():
    """One request and one token a second. The third has its turn at 2 s, and the second takes the tokens until 6 s, which is beyond 4 s."""
    limits = {"requests_per_minute": 60, "tokens_per_minute": 60}
    async with faulty_server(echo) as server, client_of(server.url, **limits) as client:
        await client.post("", 0)
        began = asyncio.get_running_loop().time()
        with verdict_within(5):
            asking = (client.post("", number, num_tokens=5) for number in (1, 2))
            _, late = await asyncio.gather(*asking, return_exceptions=True)
        assert asyncio.get_running_loop().time() - began == pytest.approx(2.0)
        assert "leave no turn" in str(late) and late.retry_after_s == pytest.approx(2.0)
        assert server.requests == [0, 1]


@simulated
async def test_an_outage_under_a_limit_is_an_outage():
    async with faulty_server(echo, "503") as server, client_of(server.url, requests_per_minute=1) as client:
        with verdict_within(5), pytest.raises(UnavailableError, match="HTTP 503") as away:
            await client.post("", 0)
        assert (away.value.endpoint, away.value.retry_after_s) == (server.url, None)


def test_an_inner_deadline_never_lengthens_an_outer_one():
    assert remaining_s() is None
    with verdict_within(100), verdict_within(900):
        assert 0 < remaining_s() <= 100
