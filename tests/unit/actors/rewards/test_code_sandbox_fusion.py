"""Against a small server that speaks SandboxFusion's /run_code, and runs each program in our sandbox."""

import pytest
from aiohttp import web

from actors.reward_service.judgement import find_judge, judge_async
from actors.sandbox.sandbox import Sandbox, SandboxConfig, Verdict
from cluster.contracts.plugins import Plugin
from cluster.contracts.types import RewardStatus

CASES = {"cases": [{"input": "1", "output": "2"}, {"input": "2", "output": "4"}]}
FAULTS = {
    "400": lambda: web.Response(status=400),
    "cut": lambda: web.Response(body=b'{"status": "Succ', content_type="application/json"),
    "no json": lambda: web.Response(text="<html>"),
    "another answer": lambda: web.json_response([1]),
    "no result": lambda: web.json_response({"status": "Success", "message": "", "run_result": None}),
    "its sandbox": lambda: web.json_response({"status": "SandboxError", "message": "no pod"}),
}


@pytest.fixture
async def server():
    """Its URL, the requests that it got, and a fault that it may have."""
    sandbox = Sandbox(SandboxConfig())
    state = {"requests": [], "fault": None}

    async def run_code(request):
        asked = await request.json()
        state["requests"].append(asked)
        if state["fault"] is not None:
            return FAULTS[state["fault"]]()
        sandbox.config = SandboxConfig(time_s=asked["run_timeout"])
        ran = sandbox.run(asked["code"], stdin=asked["stdin"])
        status = "TimeLimitExceeded" if ran.verdict is Verdict.OUT_OF_TIME else "Finished"
        code = {Verdict.OK: 0, Verdict.OUT_OF_TIME: None}.get(ran.verdict, 1)
        stderr = "MemoryError" if ran.verdict is Verdict.OUT_OF_MEMORY else ran.detail
        result = {"status": status, "return_code": code, "stdout": ran.stdout, "stderr": stderr}
        return web.json_response({"status": "Failed" if code != 0 else "Success", "message": "", "run_result": result})

    app = web.Application()
    app.router.add_post("/run_code", run_code)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    state["url"] = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    yield state
    await runner.cleanup()
    sandbox.close()


async def judged(server, program, columns=CASES, *, mark="python", **params):
    judge = find_judge(Plugin(name="code_sandbox_fusion", params={"url": server["url"], **params}))
    (reward,) = await judge_async(
        judge, {"prompt": "?", "completion": f"```{mark}\n{program}\n```", "columns": columns}
    )
    return reward


@pytest.mark.parametrize(
    ("program", "value", "reason"),
    [
        ("print(2 * int(input()))", 1.0, None),
        ("print(2)", 0.0, "wrong"),
        ("1/0", 0.0, "crashed"),
        ("while True: pass", 0.0, "out_of_time"),
        ("a = bytearray(8 << 30)", 0.0, "out_of_memory"),
    ],
)
async def test_what_a_program_does_is_a_verdict(program, value, reason, server):
    reward = await judged(server, program, time_s=0.5 if reason == "out_of_time" else 4.0)
    assert (reward.value, {name for name, share in reward.components.items() if share}) == (value, {reason} - {None})


async def test_the_server_sees_the_input_and_never_the_output(server):
    assert (await judged(server, "print(2)", score="share", time_s=3, memory_bytes=2**29)).value == 0.5
    sent = {"code": "print(2)\n", "language": "python", "compile_timeout": 3, "run_timeout": 3, "memory_limit_MB": 512}
    assert server["requests"] == [sent | {"stdin": "1"}, sent | {"stdin": "2"}]


@pytest.mark.parametrize(
    ("language", "mark"),
    [("nodejs", "javascript"), ("nodejs", "JS"), ("cpp", "c++"), ("csharp", "C#"), ("R", "r"), ("pytest", "python")],
)
async def test_a_fence_may_have_each_usual_name_of_the_language(language, mark, server):
    reward = await judged(server, "print(2 * int(input()))", language=language, mark=mark)
    assert (reward.value, server["requests"][0]["language"]) == (1.0, language)


async def test_a_case_that_is_neither_text_nor_a_number_is_an_error_of_the_data(server):
    reward = await judged(server, "print(2)", {"cases": [{"input": "", "output": ["2"]}]})
    assert reward.status is RewardStatus.ERROR and "must be a text or a number" in reward.message


async def test_cases_beyond_the_time_for_all_are_out_of_time_by_the_servers_clock(server):
    reward = await judged(server, "while True: pass", score="share", time_s=0.5, total_s=0.5)
    assert (reward.value, reward.components["out_of_time"], len(server["requests"])) == (0.0, 1.0, 1)


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_of_the_server_is_a_failed_reward_and_no_zero(fault, server):
    server["fault"] = fault
    reward = await judged(server, "print(2)")
    assert (reward.value, reward.status) == (None, RewardStatus.ERROR)
    assert reward.message.startswith("sandbox WorkerError: sandbox_failed: /run_code")
