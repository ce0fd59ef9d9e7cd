import pytest

from cluster.contracts.config import RewardConfig, RunConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.types import Prompt, Reward, RewardStatus
from deploy.preflight.judge import judge_samples
from deploy.preflight.prompts import check_recipes
from tests.fakes import NumberedPrompts
from tests.models import make_tiny_model

pytestmark = pytest.mark.slow

JUDGES = "tests.unit.actors.judges"
ANSWERED = [Prompt(prompt_id="p0", text="1+1=", columns={"answer": "2"})]


class Says(NumberedPrompts):
    """Prompts whose answer is a command to the judge."""

    def __init__(self, command: str) -> None:
        super().__init__(size=1)
        self._command = command

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(prompt_id="p0", text="?", columns={"answer": self._command})


SIZES = {"prompts": 2}


def samples(judge: str, source, **settings):
    return judge_samples(RewardConfig(judge=judge, **settings), {"prompts": source}, None, models={}, group_sizes=SIZES)


def test_what_the_judge_said_is_kept():
    empty, answer = samples("exact_match", ANSWERED)
    assert (empty.completion, empty.reward) == ("an empty completion", Reward(value=0.0))
    assert (answer.completion, answer.reward) == ("the text of column 'answer'", Reward(value=1.0))


def test_a_judge_that_fails_on_some_samples_passes_and_tells():
    _, answer = samples(f"{JUDGES}:obedient", Says("raise"))
    assert answer.reward.status is RewardStatus.ERROR
    assert answer.reward.message and answer.reward.message.startswith("ValueError: no opinion (judges.py, line ")


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        ("mistyped", "fails on each of 2 samples, the first time with: KeyError: 'anser'"),
        ("verbose", "returned a reward of type str"),
        ("undecided", "not finite: nan"),
    ],
)
def test_a_judge_that_fails_on_all_samples_is_refused_with_its_reason(judge, message):
    with pytest.raises(ConfigError, match=message):
        samples(f"{JUDGES}:{judge}", Says("2"))


def test_tests_that_never_call_the_program_are_refused_before_a_program_runs():
    uncalled = Prompt(prompt_id="p0", text="?", columns={"tests": "def test_f():\n    assert f(2) == 4\n"})
    with pytest.raises(ConfigError, match=r"fails on each of 1 samples, .* use nothing of the program"):
        samples("code_asserts", [uncalled])


def test_a_part_whose_server_is_away_is_refused_at_once(tmp_path):
    judge = {"name": f"{JUDGES}:away_while", "file": str(tmp_path)}
    config = RewardConfig.model_validate({"parts": {"style": {"judge": judge}}, "hold_s": 600.0})
    with pytest.raises(ConfigError, match=r"reward\.parts\.style: http://judge:8000 is away now: connection refused"):
        judge_samples(config, {"prompts": ANSWERED}, None, models={}, group_sizes=SIZES)


def test_judges_of_the_runs_own_servers_are_built_and_the_others_tried(tmp_path):
    model, rubric = make_tiny_model(tmp_path / "model", chat_template="x"), tmp_path / "rubric.yaml"
    asking = {"name": "llm_judge", "server": "grader", "rubric": str(rubric)}
    parts = {"right": {"judge": "exact_match"}, "good": {"judge": asking}}
    servers = {"grader": {"path": str(model)}}
    with pytest.raises(ConfigError, match=r"reward.parts.good.judge='llm_judge' .* cannot be read: No such file"):
        judge_samples(
            RewardConfig.model_validate({"parts": parts, "servers": servers}),
            {"prompts": ANSWERED},
            None,
            models={},
            group_sizes=SIZES,
        )
    rubric.write_text("criteria: [{name: a, question: b, choices: [{name: x, value: 1}, {name: y, value: 0}]}]")
    config = RewardConfig.model_validate({"parts": parts, "servers": servers})
    assert [
        each.reward.components
        for each in judge_samples(config, {"prompts": ANSWERED}, None, models={}, group_sizes=SIZES)
    ] == [
        {"right": 0.0},
        {"right": 1.0},
    ]
    alone = RewardConfig.model_validate({"judge": asking, "servers": servers})
    assert judge_samples(alone, {"prompts": ANSWERED}, None, models={}, group_sizes=SIZES) == []
    make_tiny_model(model)
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"reward.servers.grader.path='.*' has no chat template"):
        judge_samples(alone, {"prompts": ANSWERED}, None, models={}, group_sizes=SIZES)


def test_a_part_that_fails_on_all_its_samples_is_refused_even_if_it_may_leave():
    parts = {"right": {"judge": "exact_match"}, "style": {"judge": f"{JUDGES}:mistyped", "on_failure": "part"}}
    with pytest.raises(
        ConfigError, match=r"prompts: reward.parts.style fails on each of its samples, .* KeyError: 'anser'"
    ):
        judge_samples(
            RewardConfig.model_validate({"parts": parts}), {"prompts": ANSWERED}, None, models={}, group_sizes=SIZES
        )


def test_a_part_of_a_source_that_stands_behind_others_is_tried_too():
    parts = {"right": {"judge": "exact_match"}, "style": {"judge": f"{JUDGES}:mistyped"}}
    config = RewardConfig.model_validate({"parts": parts, "by_source": {"maths": ["right"], "chat": ["style"]}})
    sources = ["maths"] * 5 + ["chat"]
    prompts = [Prompt(prompt_id=f"p{i}", text="?", columns={"answer": "2", "source": s}) for i, s in enumerate(sources)]
    with pytest.raises(ConfigError, match=r"reward.parts.style fails on each of its samples"):
        judge_samples(config, {"prompts": prompts}, None, models={}, group_sizes=SIZES)


def test_sources_are_looked_for_for_a_limited_time(monkeypatch):
    monkeypatch.setattr("deploy.preflight.judge._SCAN_S", -1.0)
    config = RewardConfig.model_validate(
        {"parts": {"style": {"judge": f"{JUDGES}:mistyped"}}, "by_source": {"chat": ["style"]}}
    )
    prompts = [Prompt(prompt_id="p0", text="?", columns={"answer": "2", "source": "chat"})]
    assert judge_samples(config, {"prompts": prompts}, None, models={}, group_sizes=SIZES) == []


def test_a_judge_that_compares_the_tokens_of_a_group_is_tried_on_a_group():
    config = RewardConfig(judge=f"{JUDGES}:compares")
    tried = judge_samples(config, {"prompts": ANSWERED}, None, models={}, group_sizes={"prompts": 8})
    assert [sample.reward for sample in tried] == [Reward(value=1.0)] * 2


def test_a_judge_that_compares_is_tried_on_held_out_prompts_with_as_many_samples_as_they_get():
    judge = {"name": "pairwise", "endpoint": {"urls": ["http://127.0.0.1:9"], "model": "m"}}
    sizes = {"prompts": 8, "evaluation.prompts": 1}
    message = (
        "evaluation.prompts: .*'pairwise' fails on each of 2 samples, .* the group has one; .*evaluation.num_samples"
    )
    with pytest.raises(ConfigError, match=message):
        judge_samples(RewardConfig(judge=judge), {"evaluation.prompts": ANSWERED}, None, models={}, group_sizes=sizes)


def test_a_judge_that_hangs_meets_its_deadline():
    with pytest.raises(ConfigError, match=r"fails on each of 2 samples.*reward.timeout_s=0.5"):
        samples(f"{JUDGES}:hanging", Says("2"), timeout_s=0.5)


def test_an_asynchronous_judge_is_tried_too():
    _, answer = samples(f"{JUDGES}:obedient_async", Says("parts"))
    assert answer.reward.components == {"format": 1.0, "length": 0.25}


def test_a_judge_whose_import_raises_is_refused_with_its_reason():
    with pytest.raises(ConfigError, match="does not import: RuntimeError: no licence"):
        samples("tests.unit.deploy.preflight.broken:judge", Says("2"))


def test_a_prompt_whose_source_has_no_recipe_is_refused_at_start():
    config = RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "prompts": "file",
            "reward": {"parts": {"right": {"judge": "exact_match"}}, "by_source": {"maths": ["right"]}},
        }
    )
    check_recipes([Prompt(prompt_id="p0", text="?", columns={"source": "maths"})], config, field="prompts")
    with pytest.raises(ConfigError, match=r"prompts: prompt 'p0': reward.by_source has no entry for the source None"):
        check_recipes(ANSWERED, config, field="prompts")
