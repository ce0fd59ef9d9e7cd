"""The actor around vLLM's server, with a small script in vLLM's place: it answers /health, and ends when it is asked for /end."""

import asyncio
import json
import sys
import urllib.request

import psutil
import pytest

from actors.judge_server import JudgeServer
from cluster.contracts.errors import FailureKind, WorkerError
from cluster.contracts.reward_config import JudgeServerConfig
from tests.ports import free_ports
from tests.unit.actors.environments.test_failures import until

pytestmark = pytest.mark.slow
SCRIPT = """
import http.server, json, os, subprocess, sys
arguments = dict(each.removeprefix("--").partition("=")[::2] for each in sys.argv[1:])
if arguments["model"] == "broken":
    sys.exit("no such model")
engine = subprocess.Popen(["sleep", "1000"])  # as vLLM's engine, in a process of its own

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/end":
            os._exit(3)
        self.send_response(200)
        self.end_headers()
        told = ("VLLM_API_KEY", "RAY_AUTH_TOKEN", "VLLM_USE_FLASHINFER_SAMPLER")
        self.wfile.write(json.dumps([arguments, *map(os.environ.get, told)]).encode())

http.server.HTTPServer((arguments["host"], int(arguments["port"])), Handler).serve_forever()
"""


@pytest.fixture
def started(tmp_path, monkeypatch):
    """What starts a server of a model, at a free port."""
    module = tmp_path / "vllm" / "entrypoints" / "openai"
    module.mkdir(parents=True)
    for package in (module, *module.parents[:2]):
        (package / "__init__.py").touch()
    (module / "api_server.py").write_text(SCRIPT)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-ray")
    address = f"127.0.0.1:{free_ports(1)[0]}"

    def start(path, **settings):
        config = JudgeServerConfig(path=path, **settings)
        return JudgeServer(
            config, model="grader", name="server-grader-0", address=address, token="t0ken", num_threads=2
        )

    made = []
    yield lambda *args, **settings: made.append(start(*args, **settings)) or made[-1]
    for each in made:
        each._process.kill()
        each._process.wait()


async def processes_of(server):
    """All four: that of the module, the one that looks after it, the server and its engine."""
    first = psutil.Process(server._process.pid)
    await until(lambda: len(first.children(recursive=True)) == 3)
    return [first, *first.children(recursive=True)]


def ask(server, path):
    with urllib.request.urlopen(f"http://{server.progress().detail}{path}", timeout=120) as answer:
        return json.load(answer)


async def test_a_server_is_up_when_it_is_healthy_and_its_token_is_in_no_argument(started):
    server = started("m", max_model_len=512, kv_cache_bytes=64)
    assert server.progress().phase == "starting"
    await server.warm_up()
    assert server.progress().phase == "serving"
    arguments, token, of_ray, has_flashinfer = ask(server, "/health")
    assert (token, of_ray, has_flashinfer) == ("t0ken", None, "0")
    assert {name: arguments[name] for name in ("served-model-name", "max-model-len", "kv-cache-memory-bytes")} == {
        "served-model-name": "grader",
        "max-model-len": "512",
        "kv-cache-memory-bytes": "64",
    }
    processes = await processes_of(server)
    assert all("t0ken" not in " ".join(each.cmdline()) for each in processes)
    # Ray ends an actor's own children first; the pipe closes when the actor is gone.
    server._process.kill()
    server._process.stdin.close()
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=120)
    assert not alive


async def test_a_server_that_ends_takes_its_engine_along_and_is_a_death_of_its_actor(started):
    server = started("m")
    await server.warm_up()
    _, *processes = await processes_of(server)
    with pytest.raises(OSError):
        ask(server, "/end")
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=120)
    server._process.wait()
    with pytest.raises(WorkerError) as ended:
        server.progress()
    assert not alive and ended.value.kind is FailureKind.DEATH


async def test_a_server_that_does_not_come_up_says_why(started):
    with pytest.raises(WorkerError, match=r"the server of server-grader-0 ended; its last lines: no such model"):
        await started("broken").warm_up()
