"""The LangGraph agent of docs/agents.md, with packages of its own, plays episodes of a real engine. `calculator` plays the same ones."""

import asyncio
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.prompts.reasoning_gym import ReasoningGymPrompts
from actors.rollout.worker import RolloutWorker
from cluster.contracts.config import RunConfig
from cluster.contracts.types import Refusal, Ticket
from deploy.config.loading import load
from tests.integration.commands import ROOT
from tests.integration.engines import Reference, largest_error, published

pytestmark = [pytest.mark.engine, pytest.mark.acceptance, pytest.mark.timeout(1800)]

PACKAGES = (
    "langchain-core==1.8.3",
    "langchain-openai==1.7.4",
    "langgraph==1.2.24",
    "langgraph-prebuilt==1.1.3",
    "openai==3.57.0",
)
NUM_GROUPS, GROUP_SIZE = 4, 4
SAMPLED = ("prompt_token_ids", "completion_token_ids", "loss_mask", "turns", "finish_reason", "seed")

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """Of a virtual environment that has LangGraph."""
    folder = tmp_path_factory.mktemp("langgraph")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    installed = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", *PACKAGES], capture_output=True, text=True, check=False
    )
    if installed.returncode != 0:
        refuse = pytest.fail if "CI" in os.environ else pytest.skip
        refuse(f"pip cannot install {', '.join(PACKAGES)}: {installed.stderr[-1000:]}")
    return python


@pytest.fixture(scope="module")
def config(python, tmp_path_factory) -> RunConfig:
    page = (ROOT / "docs/agents.md").read_text()
    (agent,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "langgraph" in block)
    file = tmp_path_factory.mktemp("agent") / "agent.py"
    file.write_text(agent)
    environments = {"agent": {"name": "command", "argv": [str(python), str(file)]}, "asks": {"name": "calculator"}}
    return load("deploy/runs/calculator.yaml", ["environment=null", f"environments={json.dumps(environments)}"])


@pytest.fixture(scope="module")
def model(config) -> Reference:
    return Reference(Path(config.model.path))


@pytest.fixture(scope="module")
def rows(config, model) -> dict[str, Rows]:
    """By environment, trajectory by trajectory."""
    return asyncio.run(played(config, model))


async def played(config: RunConfig, model: Reference) -> dict[str, Rows]:
    worker = RolloutWorker.with_vllm(config, name="w0", run_id="run", num_threads=1)
    try:
        await worker.load(*published(model, version=0))
        return {name: await rows_of(worker, name, config) for name in config.environments}
    finally:
        worker.stop()
        await worker.close()


async def rows_of(worker: RolloutWorker, environment: str, config: RunConfig) -> Rows:
    rows: Rows = []
    for index in range(NUM_GROUPS):  # one after the other: each trajectory of a group is a process
        async for batch in worker.generate([ticket(index, environment, config)]):
            assert not isinstance(batch, Refusal), batch
            rows += batch.to_pylist()
    return rows


def ticket(index: int, environment: str, config: RunConfig) -> Ticket:
    """Question and seed are the same for all environments."""
    prompt = ReasoningGymPrompts(**config.prompts.params)[index]
    return Ticket(
        index=index,
        prompt=replace(prompt, columns={**prompt.columns, "environment": environment}),
        num_trajectories=GROUP_SIZE,
        seed=index,
        policy_version=0,
        sampling=config.sampling,
    )


def test_the_agent_has_packages_of_its_own_alone(python, tmp_path):
    finds = "from importlib.util import find_spec; print([bool(find_spec(name)) for name in ('langgraph', 'torch', 'cluster')])"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run([python, "-c", finds], env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[True, False, False]"


def test_the_agents_rows_are_those_of_an_environment_that_asks(rows):
    assert len(rows["agent"]) == NUM_GROUPS * GROUP_SIZE
    for one, other in zip(rows["agent"], rows["asks"], strict=True):
        assert [one[name] for name in SAMPLED] == [other[name] for name in SAMPLED]
        assert json.loads(one["messages"]) == json.loads(other["messages"])


def test_each_token_has_the_log_prob_that_the_model_gives_it(rows, model):
    for row in rows["agent"]:
        prompt, completion, mask = (row[name] for name in ("prompt_token_ids", "completion_token_ids", "loss_mask"))
        expected = model.logprobs(prompt + completion)[len(prompt) - 1 :]
        assert largest_error(row["rollout_logprobs"], [each * m for each, m in zip(expected, mask, strict=True)]) < 1e-4
        assert sum(mask) == sum(turn["end"] - turn["start"] for turn in row["turns"])


def test_a_history_that_is_only_appended_to_is_one_segment_with_a_turn_after_each_call(rows):
    nums_calls = [json.loads(row["episode"])["num_calls"] for row in rows["agent"]]
    assert {*nums_calls} == {0, 1}
    for row, num_calls in zip(rows["agent"], nums_calls, strict=True):
        assert (row["segment_index"], row["num_segments"], len(row["turns"])) == (0, 1, 1 + num_calls)
        assert dict(row["reward_components"])["environment/calls"] == num_calls


def test_the_agents_verdict_is_the_reward(rows):
    assert {row["reward"] for row in rows["agent"]} == {0.0, 1.0}
    for row in rows["agent"]:
        last, answer = json.loads(row["messages"])[-1], json.loads(row["info"])["answer"]
        assert (row["reward"], row["reward_status"]) == (float(last["content"] == answer), "ok")
