"""The machine's memory, looked at by another process, of which a stand-in answers here."""

import json
import subprocess
import sys
from dataclasses import asdict
from functools import partial

import pytest

from cluster.contracts.errors import ConfigError
from cluster.remote.fork_server import fork_server
from deploy.config.loading import validated
from deploy.preflight import asked_memory, machine
from tests.model_shapes import write

GPUS = {"rollout": {"gpus_per_worker": 1}, "learner": {"gpus_per_rank": 1}}


class Other:
    """The other process: answers as it would, or not at all."""

    def __init__(self, *, is_there: bool = True) -> None:
        self.asked: list[str] = []
        self._is_there = is_there

    def ask(self, function: str, question: str):
        assert function == "deploy.preflight.asked_memory:answered"
        self.asked.append(question)
        return partial(asked_memory.answered, question) if self._is_there else lambda: None


@pytest.fixture
def run(tmp_path):
    path = write("Qwen/Qwen2.5-0.5B-Instruct", tmp_path)
    return lambda **sections: validated({"model": {"path": str(path)}, "prompts": "file", **sections})


@pytest.mark.parametrize("sections", [{}, GPUS], ids=["CPUs", "GPUs"])
@pytest.mark.parametrize("is_there", [True, False])
def test_what_another_process_finds_is_what_is_found_here(sections, is_there, run):
    config, other = run(**sections), Other(is_there=is_there)
    asked = asked_memory.asked(config, frozenset({"reference"}), is_local=False, ask=other.ask)

    assert asked() == machine.estimate(config, frozenset({"reference"}), is_local=False)
    assert len(other.asked) == 1


def test_what_another_process_refuses_is_refused_here(run, monkeypatch):
    monkeypatch.setattr("learner.memory.free_memory_bytes", lambda: 2**20)
    asked = asked_memory.asked(run(), frozenset(), is_local=True, ask=Other().ask)

    with pytest.raises(ConfigError, match=r"0\.0 GiB are free"):
        asked()


OWN_CODE = {"reference": {"path": "other", "trust_remote_code": True, "revision": "0" * 40}}
INFINITE = {"algorithm": {"policy_loss": {"name": "ppo_clip", "dual_clip": float("inf")}}}


@pytest.mark.parametrize("sections", [OWN_CODE, INFINITE], ids=["a model's own code", "an infinite number"])
def test_what_another_process_had_better_not_look_at_is_looked_at_here(sections, run):
    other = Other()
    asked_memory.asked(run(**sections), frozenset(), is_local=False, ask=other.ask)

    assert other.asked == []


def test_the_process_that_actors_are_forked_of_answers(run, monkeypatch: pytest.MonkeyPatch):
    """Ray is hidden from what it imports."""
    monkeypatch.setattr("cluster.remote.fork_server._ANSWER_S", 240.0)  # its imports take longer on a busy machine
    config = run()
    with fork_server("deploy.cluster_up.factories:import_actors") as server:
        server.ask(
            "deploy.preflight.asked_memory:answered", json.dumps([config.model_dump_json(), ["reference"], False])
        )
        answer = server.answer()

    assert answer == json.dumps([asdict(machine.estimate(config, frozenset({"reference"}), is_local=False)), None])


def test_a_driver_that_asks_does_not_import_the_models_of_transformers(tmp_path):
    """Half of what it would import in all."""
    program = """
import json, sys
from dataclasses import asdict
from deploy import preflight
from deploy.config import loading
from deploy.preflight.machine import Memory
memory = Memory(num_parameters=1, dtype="float32", rank=1, worker=1, cache="", reference=1, judging={}, total=1, free=2)
answer = json.dumps([asdict(memory), None])
config = loading.load("deploy/runs/quickstart.yaml", [f"run_dir={sys.argv[1]}"])
preflight.check(config, ask=lambda function, question: lambda: answer)
print([each for each in ("torch._dynamo", "transformers.modeling_utils", "torch.distributed.tensor") if each in sys.modules])
"""
    said = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True, timeout=300
    )
    assert said.stdout == "[]\n"
