"""A machine that does not hurry and has room: how busy or how large the tests' own is decides no test."""

import pytest

from cluster.contracts.reward_config import RewardConfig
from deploy.preflight import judge

GIB = 2**30


@pytest.fixture(autouse=True)
def unhurried(monkeypatch):
    """A check looks at prompts for half a second or two, waits 5 s for a server, 30 s for an episode: a busy machine may stand still."""
    for limit in ("prompts._SCAN_S", "judge._SCAN_S", "servers._TIMEOUT_S", "environments._PATIENCE_S"):
        monkeypatch.setattr(f"deploy.preflight.{limit}", 600.0)


@pytest.fixture(autouse=True)
def roomy(monkeypatch):
    for module in ("learner.memory", "deploy.preflight.machine"):
        monkeypatch.setattr(f"{module}.free_memory_bytes", lambda: 64 * GIB)


@pytest.fixture
def default_judge() -> None:
    """For tests of what it says."""


@pytest.fixture(autouse=True)
def default_judge_untried(request, monkeypatch):
    """It would be started in a process of its own, half a second each time. All other judges are."""
    tried = judge.judge_samples

    def judge_samples(config, *sources, **how):
        return [] if config == RewardConfig() else tried(config, *sources, **how)

    if "default_judge" not in request.fixturenames:
        monkeypatch.setattr(judge, "judge_samples", judge_samples)
