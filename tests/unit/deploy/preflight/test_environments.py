"""What is known of environments before a run starts."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from cluster.contracts.errors import ConfigError
from deploy.preflight import check
from tests.integration.conversations import ENVIRONMENT, TEMPLATE
from tests.models import make_tiny_model
from tests.unit.deploy.preflight.runs import run

pytestmark = pytest.mark.slow
WORLDS = "tests.unit.deploy.preflight.worlds"
ROWS = tuple({"messages": [{"role": "user", "content": str(number)}], "kind": "game"} for number in range(2))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), chat_template=TEMPLATE)


def shown(config) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(check(config).table())
    return " ".join(out.getvalue().split())


def refusal(config) -> str:
    with pytest.raises(ConfigError) as refused:
        check(config)
    return str(refused.value)


def test_an_environment_is_started_and_no_judge_is_asked(tmp_path, model):
    text = shown(run(tmp_path, model, f"environment={ENVIRONMENT}", rows=ROWS))
    assert (
        "environment digits_wanted tests.integration.conversations:digits_wanted, all episodes in one process" in text
    )
    assert "limits 16 turns, 300 s" in text
    assert "judge none: environments reward their episodes" in text


def test_a_system_message_alone_is_no_whole_prompt_only_where_no_environment_adds_to_it(tmp_path):
    """Templates that want a user's message refused the prompts that are advised for Gymnasium."""
    wants_user = (
        "{% if messages[0].role == 'system' and messages | length == 1 %}{{ raise_exception('no user') }}{% endif %}"
    )
    model = make_tiny_model(tmp_path / "model", chat_template=wants_user + TEMPLATE)
    rows = [{"messages": [{"role": "system", "content": str(number)}]} for number in range(2)]
    assert "no user" not in shown(run(tmp_path, model, f"environment={ENVIRONMENT}", rows=rows))
    assert "no user" in refusal(run(tmp_path, model, rows=rows))


@pytest.mark.parametrize(
    ("world", "said"), [("seeded", "had the same observations in 4 turns"), ("of_its_index", "DIFFERS")]
)
def test_two_episodes_of_a_task_are_held_against_each_other(tmp_path, model, world, said):
    config = run(tmp_path, model, f"environment={WORLDS}:{world}", rows=ROWS)
    out = " ".join(str(row) for row in check(config, plays=True).rows)
    assert "played twice" in out and said in out
    assert "played twice" not in str(check(config).rows)


def test_scripted_replies_have_token_ids_for_agents_that_go_on_with_them(tmp_path, model):
    def row(adds: int) -> str:
        world = f"{{name: '{WORLDS}:of_token_ids', adds: {adds}}}"
        rows = check(run(tmp_path, model, f"environment={world}", rows=ROWS), plays=True).rows
        (said,) = [text for _, name, text in rows if "played twice" in name]
        return said

    assert row(0) == "both episodes of a task had the same observations in 2 turns"
    # ab, the reply 10, eos and the two that the agent adds.
    assert "turn 2: [14, 15, 5, 4, 1, 5, 6] in one episode, and [14, 15, 5, 4, 1, 5, 7] in the other" in row(1)


def test_one_that_fails_before_it_asks_the_model_is_refused_where_environments_are_played(tmp_path, model):
    config = run(tmp_path, model, f"environment={WORLDS}:broken", rows=ROWS)
    with pytest.raises(
        ConfigError, match=r"environment fails before it asks the model \(environment: KeyError: .page.\)"
    ):
        check(config, plays=True)


def test_an_agent_may_send_the_runs_own_temperature_and_no_other(tmp_path, model):
    config = run(tmp_path, model, f"environment={WORLDS}:warm", "sampling.temperature=0.7", rows=ROWS)
    assert "same observations in 1 turns" in str(check(config, plays=True).rows)
    config = run(tmp_path, model, f"environment={WORLDS}:warm", rows=ROWS)
    with pytest.raises(ConfigError, match=r"temperature=0.7 differs from the run's 1"):
        check(config, plays=True)


NO_TOOLS = (
    "environment gives the model tools, and model.chat_template: the chat template does not show tools to the model; set it to a template "
    "with tools, or use none"
)


@pytest.mark.parametrize("plays", [False, True])
def test_tools_are_refused_where_the_chat_template_takes_none(tmp_path, model, plays):
    config = run(tmp_path, model, f"environment={WORLDS}:with_tool", rows=ROWS)
    with pytest.raises(ConfigError, match=NO_TOOLS):
        check(config, plays=plays)


def test_tools_of_a_later_turn_are_refused_where_environments_are_played(tmp_path, model):
    config = run(tmp_path, model, f"environment={WORLDS}:with_tool_later", rows=ROWS)
    with pytest.raises(ConfigError, match=NO_TOOLS):
        check(config, plays=True)


def test_one_that_does_not_import_is_refused_with_its_setting(tmp_path, model):
    wrong = {"kind": "tests.integration.conversations:gone"}
    said = refusal(run(tmp_path, model, f"environments={wrong}", "episodes.column=kind", rows=ROWS))
    assert "environments.kind='tests.integration.conversations:gone'" in said


def test_a_parameter_that_it_does_not_take_is_refused(tmp_path, model):
    said = refusal(run(tmp_path, model, f"environment={{name: {ENVIRONMENT}, turn: 3}}", rows=ROWS))
    assert "environment.turn=3 is not a parameter" in said and "it takes: turns" in said


def test_a_prompt_that_names_no_environment_is_refused(tmp_path, model):
    named = {"other": ENVIRONMENT}
    said = refusal(run(tmp_path, model, f"environments={named}", "episodes.column=kind", rows=ROWS))
    assert "environments has no entry for 'game' (column 'kind'); it has: other" in said


def test_a_model_that_cannot_converse_is_refused(tmp_path, tmp_path_factory):
    plain = make_tiny_model(tmp_path_factory.mktemp("plain"))
    assert "the model has no chat template" in refusal(run(tmp_path, plain, f"environment={ENVIRONMENT}", rows=ROWS))


def test_texts_without_roles_are_refused(tmp_path, model):
    overrides = (f"environment={ENVIRONMENT}", "prompts.text_as=text")
    said = refusal(run(tmp_path, model, *overrides, rows=({"prompt": "1+1="},)))
    assert (
        "is plain text, and the environment 'digits_wanted' needs chat messages; set prompts.text_as=user_message"
        in said
    )


def test_variables_that_an_environment_is_promised_must_be_there(tmp_path, model):
    overrides = (f"environment={ENVIRONMENT}", "episodes.env=[SURELY_NOT_SET]")
    assert "episodes.env names SURELY_NOT_SET" in refusal(run(tmp_path, model, *overrides, rows=ROWS))


def test_of_mixed_prompts_judges_are_tried_on_single_turns_alone(tmp_path, model, default_judge):
    single = {"prompt": "1+1=", "answer": "2", "kind": "plain"}
    both = {"game": ENVIRONMENT, "plain": "single_turn"}
    text = shown(run(tmp_path, model, f"environments={both}", "episodes.column=kind", rows=(*ROWS, single)))
    assert "judge exact_match" in text and "column 'answer'" in text


def test_settings_of_episodes_without_an_environment_are_refused(tmp_path, model):
    with pytest.raises(ConfigError, match="episodes is set, but without an environment every prompt has a single turn"):
        run(tmp_path, model, "episodes.max_turns=3")
