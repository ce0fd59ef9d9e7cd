"""Python for the model, in the real sandbox."""

import asyncio

import psutil
import pytest

from actors.environments.host.main import find_environment
from actors.environments.python_tool import python_tool
from cluster.contracts.errors import ConfigError
from cluster.contracts.plugins import Plugin
from cluster.contracts.types import RewardStatus
from tests.unit.actors.environments.adapters import hosted_variant
from tests.unit.actors.environments.scripted import Scripted, calls, hosted, task

pytestmark = pytest.mark.slow  # all of it: each environment is a process


async def test_the_model_sees_what_its_programs_print_and_how_they_fail():
    model = Scripted(
        calls("python", code="print(6 * 7)"),
        calls("python", code="x = 1"),
        calls("python", code="print('half'); print(x)"),
        calls("python", code="open('/etc/passwd')"),
        calls("python", code="while True: pass"),
        calls("python", code="print('a' * 100 + 'b' * 100)"),
        "42",
    )
    async with hosted("with_patient_python", params={"time_s": 0.5, "max_characters": 140}) as host:
        end = await host.run(task(), model)
    printed, nothing, crashed, refused, late, long = model.heard
    assert (printed, nothing) == ("42", "the program printed nothing")
    assert crashed.startswith("half\ncrashed: exit code 1") and "name 'x' is not defined" in crashed
    assert "Permission" in refused and late.startswith("out_of_time: more than 0.5 s of processor time")
    assert long == "a" * 70 + "\n[... 60 characters ...]\n" + "b" * 70
    assert (end.reward, end.status, end.num_calls, end.num_malformed_calls) == (None, RewardStatus.OK, 6, 0)


async def test_episodes_run_their_programs_side_by_side_and_the_sandboxes_end_with_the_host():
    others = psutil.Process().children(recursive=True)  # of other tests, such as multiprocessing's own
    async with hosted_variant("with_python") as host:
        models = [Scripted(calls("python", code=f"print({n})")) for n in range(8)]
        async with asyncio.TaskGroup() as tasks:
            for model in models:
                tasks.create_task(host.run(task(), model))
        assert [model.heard for model in models] == [[str(n)] for n in range(8)]
        children = [child for child in psutil.Process().children(recursive=True) if child not in others]
    assert children
    psutil.wait_procs(children, timeout=120)
    assert not [child for child in children if child.is_running()]


def test_a_sandbox_that_cannot_be_is_refused_and_no_reward():
    with pytest.raises(ConfigError, match=r"environment\.sandbox"):
        find_environment(Plugin(name="with_python", params={"sandbox": {"level": "prison"}}), field="environment")


def test_the_tool_tells_the_model_how_to_use_it():
    about = python_tool().schema["function"]
    assert about["name"] == "python" and "Each program starts afresh" in about["description"]
    assert about["parameters"]["properties"]["code"]["description"] == "the whole program; it must print its results."
