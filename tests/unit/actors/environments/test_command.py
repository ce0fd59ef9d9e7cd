"""Programs as environments: real ones, with OpenAI's client, in processes of their own."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from actors.processes.printed import PrintedLines
from cluster.contracts.episodes import EpisodeEnd
from cluster.contracts.errors import ConfigError, Limit
from cluster.contracts.types import RewardStatus
from tests.unit.actors.environments.scripted import Scripted, Silent, hosted, overrun, started, task
from tests.unit.actors.environments.test_failures import has_text, is_gone, until

pytestmark = pytest.mark.slow  # all of it: each environment is a process

AGENT = """
import json, sys
from random import Random
from openai import OpenAI

task = json.load(sys.stdin)
client, messages = OpenAI(), task["messages"]
secret = Random(task["seed"]).randint(1, 20)
print("I begin with", task["prompt"])
for turn in range(6):
    text = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
    messages += [{"role": "assistant", "content": text}]
    if text == str(secret):
        break
    messages += [{"role": "user", "content": "higher" if int(text) < secret else "lower"}]
print(json.dumps({"reward": 1.0 - 0.1 * turn, "turns": turn + 1}))
"""
FORKS = """
import os, sys, time
if os.fork() == 0:
    if os.fork() == 0:
        time.sleep(1000)
    time.sleep(1000)
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(1000)
"""


def program(directory: Path, text: str, *arguments: str) -> dict[str, list[str]]:
    file = directory / "agent.py"
    file.write_text(dedent(text))
    return {"argv": [sys.executable, str(file), *arguments]}


def running(params: dict[str, list[str]], **how):
    return hosted("actors.environments.command:command", params=params, **how)


async def end_of(directory: Path, text: str, **how) -> EpisodeEnd:
    async with running(program(directory, text), **how) as host:
        return await host.run(task(), Scripted())


def in_group(pid: int) -> list[int]:
    return [each.pid for each in psutil.process_iter() if _group_of(each.pid) == pid and not is_gone(each.pid)]


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


async def test_a_program_with_openais_client_is_an_environment(tmp_path):
    lines, model = PrintedLines(), Scripted("10", "13")
    async with running(program(tmp_path, AGENT), printed=lines) as host:
        end = await host.run(task(seed=0), model)
    assert end == EpisodeEnd(reward=0.9, components={"turns": 2.0})
    assert model.heard == ["higher"]
    assert lines.last().lines == ("I begin with Guess.",)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("print(0.5)", 0.5),
        ("print(0.5, end='')", 0.5),
        ("print('{\"reward\": 2}\\n')", 2.0),
        ("print('null')", None),
        ("pass", None),
    ],
)
async def test_the_last_line_is_the_verdict(text, reward, tmp_path):
    assert await end_of(tmp_path, text) == EpisodeEnd(reward=reward)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys; sys.exit('no key')", "ended with exit code 1: no key"),
        ("import os; os._exit(3)", "ended with exit code 3: nothing on stderr"),
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("print('all went well')", "DataError: the last line on stdout must be a verdict in JSON, not b'all went well"),
        ("print('NaN')", "returned a reward that is not finite"),
        ("print([1])", "returned a reward of type list"),
    ],
)
async def test_all_else_is_a_failure_and_never_a_zero(text, message, tmp_path):
    end = await end_of(tmp_path, text)
    assert (end.reward, end.status, end.failed_stage) == (None, RewardStatus.ERROR, "environment")
    assert message in end.message


async def test_a_program_that_is_not_there_is_named():
    async with running({"argv": ["/no/such/agent"]}) as host:
        end = await host.run(task(), Scripted())
    assert "/no/such/agent cannot be run" in end.message
    with pytest.raises(ConfigError, match="argv"):
        async with running({"argv": []}):
            pass


async def test_a_program_that_fails_over_a_limit_is_truncated(tmp_path):
    async with running(program(tmp_path, AGENT), max_turns=2) as host:
        assert await host.run(task(seed=0), Scripted("1", "2", "3")) == EpisodeEnd(limit=Limit.TURNS)


async def test_a_program_sees_what_is_named_and_no_modules_of_the_hosts(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("SHOP_URL", "http://shop")
    text = """
    import os
    names = ("HF_TOKEN", "PYTHONPATH", "SHOP_URL", "OWN", "OPENAI_BASE_URL", "OPENAI_API_KEY")
    print(sum(2**i for i, name in enumerate(names) if name in os.environ) if os.getcwd() == os.environ["OWN"] else -1)
    """
    params = {**program(tmp_path, text), "env": {"OWN": str(tmp_path)}, "cwd": str(tmp_path)}
    async with running(params, env=("SHOP_URL",)) as host:
        assert (await host.run(task(), Scripted())).reward == 4 + 8 + 16 + 32


async def test_a_program_reaches_its_episode_without_the_proxy(tmp_path):
    text = "import urllib.request as it; print(len([host for host in ('127.0.0.1', 'shop') if it.proxy_bypass(host)]))"
    params = {**program(tmp_path, text), "env": {"HTTP_PROXY": "http://proxy", "no_proxy": "shop"}}
    async with running(params) as host:
        assert (await host.run(task(), Scripted())).reward == 2.0


async def test_gigabytes_without_an_end_of_line_pass_through(tmp_path):
    assert await end_of(tmp_path, "print('x' * 2**25, 1, sep=chr(10))") == EpisodeEnd(reward=1.0)


async def test_a_program_that_leaves_a_process_ends_all_the_same(tmp_path):
    text = """
    import os, time
    if os.fork() == 0:
        time.sleep(1000)
    print(os.getpid())
    """
    async with running(program(tmp_path, text)) as host:
        end = await host.run(task(), Scripted())
        await until(lambda: in_group(int(end.reward)) == [])


async def test_a_program_that_forks_and_sleeps_is_gone_after_a_cancel(tmp_path):
    file = tmp_path / "pid"
    async with running(program(tmp_path, FORKS, str(file))) as host:
        episode = asyncio.create_task(host.run(task(), Silent()))
        await until(lambda: has_text(file))
        group = int(file.read_text())
        await until(lambda: len(in_group(group)) == 3)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        await until(lambda: in_group(group) == [])
        assert len(started()) == 1  # the host's process goes on


async def test_a_program_is_gone_after_its_deadline(tmp_path):
    file = tmp_path / "pid"
    async with running(program(tmp_path, FORKS, str(file))) as host:
        end = await overrun(host.run(task(), Silent()), begun=until(lambda: has_text(file)))
        assert (end.reward, end.status, end.is_suspect) == (None, RewardStatus.TIMEOUT, False)
        await until(lambda: in_group(int(file.read_text())) == [])


PARENT = """
import asyncio, sys
from tests.unit.actors.environments.scripted import Silent, hosted, task

async def main(*argv):
    async with hosted("actors.environments.command:command", params={"argv": argv}) as host:
        await host.run(task(), Silent())

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_program_does_not_outlive_a_parent_that_is_killed(tmp_path):
    file = tmp_path / "pid"
    search = os.pathsep.join(path for path in sys.path if path)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *program(tmp_path, FORKS, str(file))["argv"]],
        env={**os.environ, "PYTHONPATH": search},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        await until(lambda: has_text(file))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    await until(lambda: in_group(int(file.read_text())) == [])


async def test_many_programs_leave_no_descriptors(tmp_path):
    async with running(program(tmp_path, "print(1)")) as host:
        await host.run(task(), Scripted())
        (process,) = started()
        before = process.num_fds()
        for _ in range(20):
            assert (await host.run(task(), Scripted())).reward == 1.0
        await until(lambda: process.num_fds() <= before)


async def test_the_example_of_the_docs_runs(tmp_path):
    text = Path("docs/agents.md").read_text().partition("```python\n")[2].partition("```")[0]
    model = Scripted("I think it is 4", "4")
    async with running(program(tmp_path, text)) as host:
        assert await host.run(task(answer="4"), model) == EpisodeEnd(reward=1.0)
    assert [len(asked.messages) for asked in model.asked] == [0, 1]
