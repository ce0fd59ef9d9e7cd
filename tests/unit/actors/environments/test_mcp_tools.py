"""Tools of a real MCP server, over stdio and over HTTP on loopback."""

import asyncio
import contextlib
import os
import subprocess
import sys
from typing import Any

import psutil
import pytest
from mcp import MCPError, types

from actors.environments.host.ends import raised
from actors.environments.host.main import find_environment
from actors.environments.mcp_tools import mcp_session, mcp_tools
from actors.processes import tied
from cluster.contracts.episodes import Asked, Said
from cluster.contracts.errors import ConfigError, DataError, ToolError
from cluster.contracts.plugins import Plugin
from cluster.contracts.types import RewardStatus
from tests.unit.actors.environments.adapters import hosted_variant
from tests.unit.actors.environments.played import ScriptedEpisode
from tests.unit.actors.environments.scripted import Scripted, calls, task
from tests.unit.actors.environments.test_failures import is_gone, until

pytestmark = pytest.mark.slow  # all of it: each environment is a process

SERVER = [sys.executable, "-m", "tests.unit.actors.environments.mcp_server"]
STANDS_STILL = [sys.executable, "-m", "timeit", "-n1", "-r1", "-s", "import time", "time.sleep(600)"]


@contextlib.contextmanager
def http_server(**environment: str):
    with subprocess.Popen(
        [*SERVER, "http"], stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    ) as server:
        try:
            assert server.stdout
            yield f"http://127.0.0.1:{int(server.stdout.readline())}/mcp"
        finally:
            server.kill()


def servers(*statuses: str) -> list[psutil.Process]:
    """Those below this process, without their wrappers; with `statuses` those that have one of them."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            command = each.cmdline()
            if (
                SERVER[2] in command
                and tied.__file__ not in command
                and each.status() in (statuses or (each.status(),))
            ):
                found.append(each)
    return found


@pytest.fixture(params=["stdio", "http"])
def server(request):
    if request.param == "stdio":
        yield {"command": SERVER}
    else:
        with http_server() as url:
            yield {"url": url}


async def test_the_model_calls_the_tools_of_the_server_by_their_own_schemas(server):
    model = Scripted(calls("note", text="milk", times=2), calls("note", text="eggs"), "I have noted it.")
    async with hosted_variant("mcp_tools", **server) as host:
        end = await host.run(task(), model)
    assert (end.reward, end.status, end.num_calls, end.num_malformed_calls) == (None, RewardStatus.OK, 2, 0)
    assert model.heard == ["2 notes", "3 notes"]
    schemas = {each["function"]["name"]: each["function"] for each in model.asked[0].tools}
    assert [*schemas] == ["note", "divide", "picture", "variable", "sleep", "die", "stand_still"]
    assert schemas["note"]["description"] == "Writes a note down."
    assert schemas["note"]["parameters"]["required"] == ["text"]


async def test_what_the_server_or_its_schema_refuses_goes_to_the_model(server):
    model = Scripted(calls("divide", by=0), calls("divide", by="zero"), calls("note"), calls("picture"))
    async with hosted_variant("mcp_tools", **server) as host:
        end = await host.run(task(), model)
    assert (end.status, end.num_calls, end.num_malformed_calls) == (RewardStatus.OK, 4, 3)
    assert model.heard == [
        "error: Error executing tool divide: zero divides nothing",
        "error: wrong arguments of divide: by: 'zero' is not of type 'number'",
        "error: wrong arguments of note: 'text' is a required property",
        "a dot\n[image, which is not shown]",
    ]


async def test_a_server_that_dies_and_one_that_does_not_answer_are_the_environments_failures(server):
    async with hosted_variant("mcp_tools", timeout_s=0.5, **server) as host:
        late = await host.run(task(), Scripted(calls("sleep")))
    async with hosted_variant("mcp_tools", **server) as host:
        dead = await host.run(task(), Scripted(calls("die")))
    assert (late.reward, late.status, late.failed_stage) == (None, RewardStatus.TIMEOUT, "tool:sleep")
    assert (dead.reward, dead.status) == (None, RewardStatus.ERROR)
    assert dead.failed_stage == ("tool:die" if "command" in server else "environment")  # HTTP fails as the session does


async def test_each_episode_has_a_server_of_its_own_which_ends_with_it():
    async with hosted_variant("mcp_tools", command=SERVER) as host:
        for _ in range(2):
            model, there = Scripted(calls("note", text="x")), list[int]()

            async def converse(asked: Asked, model=model, there=there) -> Said:
                there.append(len(servers()))
                return await model(asked)

            await host.run(task(), converse)
            assert (model.heard, there) == (["1 notes"], [1, 1])
            await until(lambda: servers() == [])


async def test_a_server_that_hangs_ends_with_the_process_of_its_environment():
    def stopped() -> list[psutil.Process]:
        return servers(psutil.STATUS_STOPPED)

    async with hosted_variant("mcp_tools", command=SERVER) as host:
        running = asyncio.create_task(host.run(task(), Scripted(calls("stand_still"))))
        await until(stopped)
        (server,) = stopped()
        server.parent().parent().kill()  # its wrapper's
        await until(lambda: is_gone(server.pid))
        running.cancel()
        await asyncio.wait([running])


async def test_only_tools_that_are_named_are_offered_and_a_server_sees_only_variables_that_are(monkeypatch):
    monkeypatch.setenv("PLACE", "here")
    monkeypatch.setenv("SECRET", "hush")
    model = Scripted(calls("variable", of="PLACE"), calls("variable", of="SECRET"), calls("note", text="x"))
    params: dict[str, Any] = {"command": SERVER, "tools": ["variable"], "env": ["PLACE"]}
    async with hosted_variant("mcp_tools", sees=("PLACE", "SECRET"), **params) as host:
        await host.run(task(), model)
    assert model.heard == ["here", "not set", "error: there is no tool 'note'; there are: variable"]


async def test_a_bearer_token_goes_to_the_server(monkeypatch):
    monkeypatch.setenv("NOTES_KEY", "open\n")  # as secret files end
    with http_server(SERVER_KEY="open") as url:
        async with hosted_variant("mcp_tools", url=url, key_env="NOTES_KEY", sees=("NOTES_KEY",)) as host:
            assert (await host.run(task(), Scripted("Hello."))).status is RewardStatus.OK
        async with hosted_variant("mcp_tools", url=url) as host:
            assert (await host.run(task(), Scripted("Hello."))).status is RewardStatus.ERROR


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({}, "one of command and url"),
        ({"command": SERVER, "tools": ["nothing"]}, "no tool 'nothing'; it has: note"),
        ({"command": ["/nowhere/server"]}, "/nowhere/server"),
        ({"command": [sys.executable, "-c", "exit(3)"]}, "MCPError: Connection closed"),
        (
            {"command": [*STANDS_STILL], "start_timeout_s": 0.3},
            f"within start_timeout_s=0.3: {sys.executable} -m timeit",
        ),
        ({"url": "http://127.0.0.1:9/mcp"}, "All connection attempts failed"),
    ],
)
async def test_a_server_that_cannot_be_had_is_the_environments_failure(params, why):
    """As its process would tell it, without one: to start it takes a second."""
    never_asked = ScriptedEpisode([])
    with pytest.raises((ConfigError, TimeoutError, ExceptionGroup)) as caught:
        await mcp_tools(never_asked, **params)  # type: ignore[arg-type]
    end = raised(caught.value)
    assert (end.status, end.failed_stage) == (RewardStatus.ERROR, "environment")
    assert why in (end.message or "")


async def test_a_deadline_must_be_positive():
    with pytest.raises(ConfigError, match="timeout_s"):
        find_environment(Plugin(name="mcp_tools", params={"command": SERVER, "timeout_s": 0}), field="environment")


class Answering:
    """A client of a server whose tools answer, or raise, what they are told. Nobody can use its tool `odd`."""

    def __init__(self, answer: types.CallToolResult | MCPError | None = None) -> None:
        self.answer = answer

    async def list_tools(self, *, cursor: str | None) -> types.ListToolsResult:
        odd = {"type": "object", "properties": {"x": {"$ref": "https://example.org/schema.json"}}}
        schemas = {"good": {"type": "object"}, "odd": odd}
        return types.ListToolsResult(
            tools=[types.Tool(name=name, input_schema=schema) for name, schema in schemas.items()]
        )

    async def call_tool(self, tool: str, arguments: dict[str, Any]) -> types.CallToolResult:
        assert self.answer is not None
        if isinstance(self.answer, MCPError):
            raise self.answer
        return self.answer


@pytest.fixture
def answering(monkeypatch):
    """Makes sessions with a client that answers as told."""

    def session(client: Answering, *, tools: tuple[str, ...] = ("good",), url: str | None = None):
        @contextlib.asynccontextmanager
        async def connected(*_: Any):
            yield client

        monkeypatch.setattr("actors.environments.mcp_tools._client", connected)
        return mcp_session(tools=tools, url=url)

    return session


@pytest.mark.parametrize("code", [types.INTERNAL_ERROR, types.INVALID_PARAMS, -32002, 7])
async def test_an_error_of_a_tool_goes_to_the_model_under_any_code(answering, code):
    async with answering(Answering(MCPError(code=code, message="no such row"))) as (good,):
        with pytest.raises(ToolError, match="no such row"):
            await good()


@pytest.mark.parametrize(
    ("code", "url"),
    [(types.CONNECTION_CLOSED, None), (types.METHOD_NOT_FOUND, None), (types.INTERNAL_ERROR, "http://x")],
)
async def test_an_error_of_the_connection_is_the_environments_failure(answering, code, url):
    async with answering(Answering(MCPError(code=code, message="gone")), url=url) as (good,):
        with pytest.raises(MCPError, match="gone"):
            await good()


async def test_structured_content_and_links_are_shown_to_the_model(answering):
    async with answering(Answering(types.CallToolResult(content=[], structured_content={"degrees": 21}))) as (good,):
        assert await good() == '{"degrees": 21}'
    link = types.ResourceLink(uri="file:///notes.txt", name="notes")
    async with answering(Answering(types.CallToolResult(content=[link]))) as (good,):
        assert await good() == "notes: file:///notes.txt"


async def test_a_schema_that_nobody_can_use_matters_only_in_a_tool_that_is_offered(answering):
    async with answering(Answering()) as offered:
        assert [tool.name for tool in offered] == ["good"]
    with pytest.raises(DataError, match=r"tool .odd. refer to .https://example\.org"):
        async with answering(Answering(), tools=()):
            pass
