"""`treadwheel serve-reward` on a real socket: the rewards of a judge in place, whatever the judge does."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

import pytest
from typer.testing import CliRunner

from actors.reward_service.service import Asked, RewardService, conversation
from cluster.contracts.errors import ConfigError, DataError
from cluster.contracts.plugins import Plugin
from cluster.contracts.reward_config import RewardConfig
from deploy import serving
from deploy.cli import app as cli

JUDGES = "tests.unit.actors.judges"
UNHURRIED_S = 240
"""A deadline that only a hang overruns."""


@contextlib.contextmanager
def served(judge, *arguments, **environment):
    """Its URL and process; it must end well."""
    command = [sys.executable, "-m", "deploy.cli", "serve-reward", judge, *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment
    )
    try:
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, process.communicate()
        yield found[0], process
        process.send_signal(signal.SIGTERM)
        assert process.wait(UNHURRIED_S) == 0
    finally:
        process.kill()
        process.communicate()


def asked(*completions):
    columns = {"answer": "4", "messages": [{"role": "user", "content": "2+2?"}]}
    trajectories = [
        {
            "prompt": "2+2?",
            "completion": said,
            "messages": conversation(columns, prompt="2+2?", completion=said),
            "token_ids": [1] * (place + 1),
            "finish_reason": "stop",
            "seed": place,
        }
        for place, said in enumerate(completions)
    ]
    return Asked(columns=columns, trajectories=trajectories)


async def rewards(judge, group, **settings):
    service = RewardService(RewardConfig(judge=judge, **settings))
    try:
        return (await service.judge(group))[0]
    finally:
        await service.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("judge", "said", "timeout_s"),
    [
        (
            "obedient",
            {"4": "ok", "parts": "ok", "raise": "error", "nan": "error", "text": "error", "exit": "error"},
            UNHURRIED_S,
        ),
        ("obedient_async", {"parts": "ok", "raise": "error"}, UNHURRIED_S),
        ("compares", dict.fromkeys("abcd", "ok"), UNHURRIED_S),
        # Alone, since a machine that stands still for so long would let every other judgement overrun it too.
        ("obedient", {"hang": "timeout"}, 0.5),
        ("obedient_async", {"hang": "timeout"}, 0.5),
    ],
)
async def test_a_served_judge_gives_the_rewards_components_and_statuses_of_the_judge_in_place(judge, said, timeout_s):
    """`said`: completions with the status of their reward."""
    group, judge = asked(*said), f"{JUDGES}:{judge}"
    in_place = await rewards(Plugin(name=judge), group, timeout_s=timeout_s)
    with served(judge, "--timeout-s", str(timeout_s)) as (url, _):
        remote = await rewards(Plugin(name="remote", params={"endpoint": url}), group, timeout_s=UNHURRIED_S)
    facts = [[(each.value, each.status, each.components) for each in some] for some in (remote, in_place)]
    assert facts[0] == facts[1]
    assert [each.status for each in in_place] == [*said.values()]


def post(url, body, token=None, **headers):
    headers |= {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{url}/judge", data=body, headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_trajectory_needs_no_more_than_the_judge_asks_for():
    group = {"columns": {}, "trajectories": [{"token_ids": [1, 2]}]}
    assert serving._asked(group, ["token_ids"]).trajectories == group["trajectories"]
    with pytest.raises(DataError, match="a trajectory without completion"):
        serving._asked(group, ["completion"])


@pytest.mark.slow
async def test_a_served_judge_reads_an_episode_as_the_judge_in_place_does():
    """Seen before: it was given the prompt and the last words, and nothing of the turns between."""
    judge, settings = f"{JUDGES}:counts_messages", {"messages": [{"role": "user", "content": "?"}] * 4}
    group = asked("4")
    group.trajectories[0].update(settings)
    with served(judge) as (url, _):
        (remote,) = await rewards(Plugin(name="remote", params={"endpoint": url}), group)
    (in_place,) = await rewards(Plugin(name=judge), group)
    assert remote.value == in_place.value == 4.0


@pytest.mark.slow
def test_a_server_asks_for_its_token_and_says_what_is_wrong_with_a_request():
    group = {"columns": {"target": "4"}, "trajectories": [{"prompt": "2+2?", "completion": "4"}]}
    good = json.dumps({"groups": [group]}).encode()
    with served("exact_match", "column=target", "--key-env", "KEY", KEY="s3cret") as (url, _):
        assert urllib.request.urlopen(f"{url}/health").status == 200
        assert [post(url, good, token)[0] for token in (None, "wrong")] == [401, 401]
        # As each page in a browser does with a POST, also one to its own name for this address.
        assert post(url, good, "s3cret", Origin=url)[0] == 403
        answer = {"groups": [[{"reward": 1.0, "components": {}}]]}
        assert post(url, good, "s3cret") == (200, answer)
        for bad in (b"", b"[1]", b'{"groups": [{"columns": {}, "trajectories": [{"prompt": "?"}]}]}'):
            status, said = post(url, bad, "s3cret")
            assert status == 422 and "native dialect" in said["error"]
        assert post(url, b" " * (serving._MAX_BODY_BYTES + 1), "s3cret")[0] == 413


async def answer_to(*received):
    """The status with which the application answers a request whose messages these are; after them it hears nothing."""
    service: Any = None
    messages, sent = [*received], []

    async def receive():
        return messages.pop(0) if messages else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    headers = {"type": "http", "method": "POST", "path": "/judge", "headers": [], "query_string": b""}
    await serving.app(service, key=None)(headers, receive, send)
    return sent[0]["status"]


async def test_a_body_that_stands_still_or_breaks_off_is_answered(monkeypatch):
    """The server could not stop before the client left, and then printed a traceback."""
    monkeypatch.setattr(serving, "_SILENCE_S", 0.1)
    half = {"type": "http.request", "body": b"{", "more_body": True}
    assert await answer_to(half) == 503
    assert await answer_to(half, {"type": "http.disconnect"}) == 400


@pytest.mark.slow
def test_what_a_served_judge_calls_may_be_away_which_is_an_outage_for_the_run_too(tmp_path):
    body = json.dumps({"groups": [{"columns": asked("4").columns, "trajectories": asked("4").trajectories}]}).encode()
    away = tmp_path / "away"
    away.touch()
    with served(f"{JUDGES}:away_while", f"file={away}") as (url, _):
        status, said = post(url, body)
        assert status == 503 and "http://judge:8000 is away" in said["error"]
        away.unlink()
        assert post(url, body) == (200, {"groups": [[{"reward": 1.0, "components": {}}]]})


@pytest.mark.parametrize(
    ("judge", "settings", "message"),
    [
        ("exact_match", {"host": "0.0.0.0"}, "can be reached from other machines"),
        ("exact_match", {"key_env": "NOT_SET"}, "--key-env NOT_SET is not set"),
        (
            "exact_match",
            {"key_env": "BLANK", "host": "0.0.0.0"},
            "--key-env BLANK is not set in the environment, or empty",
        ),
        (
            "exact_match",
            {"host": "203.0.113.1", "key_env": "HOME"},
            "--host 203.0.113.1 --port 0 cannot be bound: .*; use another",
        ),
        ("exact_macht", {}, "did you mean 'exact_match'"),
        (f"{JUDGES}:after_others", {}, "asks for rewards, which only a run has"),
    ],
)
def test_what_cannot_be_served_is_refused(judge, settings, message, monkeypatch):
    monkeypatch.setenv("BLANK", " \n")
    given = {"host": "127.0.0.1", "port": 0, "key_env": None} | settings
    with pytest.raises(ConfigError, match=message):
        serving.serve(RewardConfig(judge=Plugin(name=judge)), says=print, **given)


def test_a_key_is_read_as_its_clients_read_it_without_white_space(monkeypatch):
    monkeypatch.setenv("KEY", "s3cret\n")
    assert serving._key("KEY", host="0.0.0.0") == "s3cret"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["reward_model", "model=x"],
            "'reward_model' asks a model that only a run has; name the judge in the run file",
        ),
        (["llm_judge", "server=grader"], "'llm_judge' asks a model that only a run has"),
        (["exact_match", "--timeout-s", "inf"], "reward.timeout_s=inf is not valid: input should be a finite number"),
    ],
)
def test_what_no_server_could_be_made_of_is_one_line(words, message):
    refused = CliRunner().invoke(cli, ["serve-reward", *words])
    assert refused.exit_code == 2 and message in refused.output, refused.output
