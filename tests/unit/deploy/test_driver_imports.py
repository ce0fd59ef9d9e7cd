"""A driver imports seconds' worth of libraries where they are used, and not with its modules."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "vllm", "reasoning_gym", "matplotlib", "aiohttp", "boto3")
SINKS = ("cluster.sinks.console", "cluster.sinks.jsonl", "cluster.sinks.tensorboard")
IMPORTS = f"""
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
print(sorted(set({HEAVY}) & {{name for name, module in sys.modules.items() if module is not None}}))
"""
LOADS = """
import sys
from cluster.contracts.config import ModelConfig
from deploy.formatters import load_formatter
load_formatter(ModelConfig(path="deploy/quickstart/model"))
print("torch._dynamo" in sys.modules)
"""


def imported_with(*modules: str) -> str:
    done = subprocess.run([sys.executable, "-c", IMPORTS, *modules], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    "modules",
    [
        ("treadwheel", "treadwheel.training", "deploy.cli", "deploy.preflight", "deploy.launch", *SINKS),
        ("deploy.learning", "deploy.recorded", "deploy.replay"),
        ("deploy.evaluation", "deploy.playing", "deploy.export"),
    ],
    ids=["train", "learn", "others"],
)
def test_the_modules_of_a_driver_import_nothing_heavy(modules):
    assert imported_with(*modules) == "[]"


def test_what_is_heavy_is_seen():
    assert imported_with("learner.algorithms.objective") == "['torch']"


def test_a_formatter_comes_without_torchs_compiler():
    done = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
