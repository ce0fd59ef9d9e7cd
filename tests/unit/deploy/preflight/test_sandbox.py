import pytest

from actors.sandbox.sandbox import Sandbox
from cluster.contracts.errors import ConfigError
from deploy.preflight.sandbox import check_sandbox
from tests.unit.deploy.preflight.runs import run


@pytest.fixture
def with_judge(tmp_path):
    return lambda **sandbox: run(tmp_path, tmp_path, f"reward.judge={{name: code_stdin, sandbox: {sandbox}}}")


def test_a_run_without_code_needs_no_sandbox(tmp_path):
    assert check_sandbox(run(tmp_path, tmp_path)) is None


def test_what_confines_programs_is_told(with_judge):
    assert check_sandbox(with_judge()).startswith("confined by ")
    assert check_sandbox(with_judge(level="none")) == "unconfined, as you"


def test_a_program_that_is_not_stopped_is_a_problem(with_judge, monkeypatch):
    unconfined = Sandbox._start

    def pretends(self):
        self.config = self.config.model_copy(update={"level": "none"})
        return unconfined(self)

    monkeypatch.setattr(Sandbox, "_start", pretends)
    with pytest.raises(ConfigError, match="a program that reads a file is not stopped by nothing"):
        check_sandbox(with_judge())


def test_a_program_may_not_take_longer_than_its_reward(with_judge):
    with pytest.raises(ConfigError, match=r"total_s=60 must be less than reward.timeout_s=30"):
        check_sandbox(with_judge(total_s=60))
