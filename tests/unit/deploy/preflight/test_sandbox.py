import pytest

from actors.sandbox.host_process import HostProcess
from cluster.contracts.config import RewardConfig
from cluster.contracts.errors import ConfigError
from deploy.preflight.sandbox import check_sandboxes


def with_judge(**sandbox):
    return RewardConfig.model_validate({"judge": {"name": "code_stdin", "sandbox": sandbox}})


def test_a_run_without_code_needs_no_sandbox():
    assert check_sandboxes(RewardConfig()) == {}


def test_what_confines_programs_is_told():
    assert check_sandboxes(with_judge())["reward.judge"].startswith("confined by ")
    assert check_sandboxes(with_judge(level="none")) == {"reward.judge": "unconfined, as you"}


def test_a_program_that_is_not_stopped_is_a_problem(monkeypatch):
    unconfined = HostProcess._start

    def pretends(self):
        self._level = "none"
        return unconfined(self)

    monkeypatch.setattr(HostProcess, "_start", pretends)
    with pytest.raises(
        ConfigError,
        match=r"reward.judge.sandbox is confined by nothing, and a program that reads a file is not stopped",
    ):
        check_sandboxes(with_judge())


def test_a_program_may_not_take_longer_than_its_reward():
    parts = {"right": {"judge": {"name": "code_stdin", "sandbox": {"total_s": 60}}, "timeout_s": 50}}
    with pytest.raises(ConfigError, match=r"reward.parts.right.judge.sandbox.total_s=60 must be less .* timeout_s=50"):
        check_sandboxes(RewardConfig.model_validate({"parts": parts}))


def test_a_limit_that_is_none_is_a_problem_of_its_setting():
    with pytest.raises(ConfigError, match=r"reward.judge.sandbox is not valid: \('time_s',\)"):
        check_sandboxes(with_judge(time_s=0))


def test_a_judge_of_code_by_its_full_path_is_checked_too():
    judge = {"name": "actors.rewards.code:code_stdin", "sandbox": {"level": "none"}}
    assert check_sandboxes(RewardConfig.model_validate({"judge": judge})) == {"reward.judge": "unconfined, as you"}
