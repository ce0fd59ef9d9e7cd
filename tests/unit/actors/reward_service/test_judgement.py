import pytest

from actors.environments.host.ends import raised
from actors.reward_service.judgement import failed, find_judge
from cluster.contracts.errors import ConfigError
from cluster.contracts.plugins import Plugin


def test_a_judge_with_parameters_bound_is_still_seen_to_be_async():
    assert find_judge(Plugin(name="tests.unit.actors.judges:obedient_async")).is_async
    assert not find_judge(Plugin(name="exact_match", params={"column": "solution"})).is_async


class Uncalled:
    def judge(self, *, completion: str) -> float:
        return float(completion == "2")


class Script:
    def __init__(self) -> None:
        raise SystemExit(2)

    def __call__(self, *, completion: str) -> float:
        return float(completion == "2")


@pytest.mark.parametrize(
    ("judge", "why"), [("Uncalled", "is a class without __call__"), ("Script", "cannot be built: SystemExit: 2")]
)
def test_a_class_that_cannot_judge_is_refused_by_name(judge, why):
    with pytest.raises(ConfigError, match=rf"reward\.judge='{__name__}:{judge}' {why}"):
        find_judge(Plugin(name=f"{__name__}:{judge}"))


def test_the_reason_of_a_failed_reward_shows_no_secret():
    error = ValueError("GET https://rm.example/judge?key=s3cr3t&city=Rome was refused")
    shown = "ValueError: GET https://rm.example/judge?key=<hidden>&city=Rome was refused"
    assert failed(error).message == raised(error).message == shown
