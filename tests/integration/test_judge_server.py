"""A real vLLM server of a frozen model, which a random model grades in the form of the rubric, on loopback and in a run."""

import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest

from actors.reward_service.judgement import find_judge, judge_async
from cluster.contracts.plugins import Plugin
from tests.integration.commands import ROOT, environment
from tests.integration.faults import Run, until, write_run
from tests.models import make_tiny_model
from tests.ports import free_ports

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]
RUBRIC = """
criteria: [{name: correct, question: "Is it right?", choices: [{name: "no", value: 0}, {name: "yes", value: 1}]}]
explain: false
"""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
TOKEN = "a-token-of-the-test"
_SERVE = """
import asyncio, sys
from actors.judge_server import JudgeServer
from cluster.contracts.reward_config import JudgeServerConfig

config = JudgeServerConfig(path=sys.argv[1], dtype="float32", kv_cache_bytes=64 * 2**20, max_concurrent_sequences=8)
server = JudgeServer(
    config, model="grader", name="server-grader-0", address=sys.argv[2], token=sys.stdin.readline().strip(), num_threads=1
)
asyncio.run(server.warm_up())
print(server.progress().detail, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("grader"), max_context=2048, chat_template=TEMPLATE)


@pytest.fixture
def rubric(tmp_path) -> str:
    (tmp_path / "rubric.yaml").write_text(RUBRIC)
    return str(tmp_path / "rubric.yaml")


async def test_a_judge_asks_a_real_server_which_wants_its_token_and_ends_with_its_parent(model, rubric):
    address = f"127.0.0.1:{free_ports(1)[0]}"
    parent = subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(model), address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
    )
    try:
        parent.stdin.write(TOKEN + "\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == f"{address}\n"
        processes = psutil.Process(parent.pid).children(recursive=True)
        assert all(TOKEN not in part for process in processes for part in process.cmdline())
        async with aiohttp.ClientSession() as session, session.get(f"http://{address}/v1/models") as refused:
            assert refused.status == 401
        asks = {"model": "grader", "prompt": "1", "max_tokens": 1}
        for path in ("/invocations", "/tokenize", "/metrics", "/scale_elastic_ep"):
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"http://{address}{path}", json=asks) as refused,
            ):
                assert refused.status == 404, path
        judge = find_judge(
            Plugin(name="llm_judge", params={"rubric": rubric, "server": "grader", "asking": {"max_tokens": 32}})
        )
        servers = {"grader": [f"http://:{TOKEN}@{address}/v1"]}
        messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
        given = {"messages": messages, "columns": {}, "servers": servers}
        (reward,), (again,) = [await judge_async(judge, given) for _ in range(2)]
        assert reward.message is None and reward.value in (0.0, 1.0)
        assert again == reward and reward.components["tokens"] > 100
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    gone, alive = psutil.wait_procs(processes, timeout=120)
    assert len(gone) >= 3 and not alive


@pytest.mark.ray
@pytest.mark.acceptance
def test_groups_wait_while_the_runs_own_server_is_replaced_and_no_reward_fails(model, rubric, tmp_path):
    file = write_run(
        tmp_path,
        make_tiny_model(tmp_path / "model"),
        num_steps=5,
        deterministic=False,
        algorithm={},
        reward={
            "timeout_s": 300,
            "parts": {
                "good": {
                    "judge": {"name": "llm_judge", "server": "grader", "rubric": rubric, "asking": {"max_tokens": 32}}
                },
                "digits": {"judge": "tests.integration.judges:digit_share"},
            },
            "servers": {"grader": {"path": str(model), "dtype": "float32", "cpus": 0.5, "kv_cache_bytes": 64 * 2**20}},
        },
    )
    run = Run(tmp_path / "run")
    with run.start(file) as driver:
        until(lambda: run.num_steps() >= 1, process=driver)
        children = psutil.Process(run.pid("server-grader-0")).children(recursive=True)
        assert run.strike("server-grader-0")
        _, alive = psutil.wait_procs(children, timeout=120)
        assert len(children) >= 3 and not alive
        assert driver.exit_code() == 0, driver.output
        assert not driver.left_behind()
    assert run.num_steps() == 5 and run.problems() == ()
    assert [event["actor"] for event in run.events("recovery")] == ["server-grader-0"]
    assert not run.events("reward_failure")
    rows = [row for table in run.trajectories().values() for row in table.to_pylist()]
    assert len(rows) == 5 * 16 and all(dict(row["reward_components"])["good"] in (0.0, 1.0) for row in rows)
    # The token stands in the servers' URLs alone.
    assert not [each for each in run.path.rglob("*") if each.is_file() and b"http://:" in each.read_bytes()]
