import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cluster.contracts.algorithm_config import KlRewardConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.hiding import HIDDEN, hidden
from deploy.config.loading import load, resolved_yaml, validated
from deploy.config.yaml_text import dumped, parse

TRAPS = [
    "5e-4",
    "1_0.5",
    ".5e3",
    "on",
    "true",
    "null",
    "1",
    "0x1f",
    "0o17",
    "09",
    "1__0",
    "1:30",
    "=",
    "<<",
    "2024-01-01",
    "a",
    "# b",
    "c: d",
    "e\x85f",
    "\u2028",
]
"""Texts, some of which look like other values."""


def smallest() -> dict:
    return {"model": {"path": "some/model"}, "prompts": "file"}


def refusal(values: dict, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        validated(values, overrides)
    return str(caught.value)


def test_a_file_and_overrides_make_a_run(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: some/model}\nprompts: {name: file, path: a.jsonl}\nnum_steps: 3\n")
    config = load(file, ["num_steps=5", "optimizer.learning_rate=3e-4", "prompts.column=question"])
    assert config.num_steps == 5
    assert config.optimizer.learning_rate == 3e-4
    assert config.prompts.params == {"path": "a.jsonl", "column": "question"}


def test_a_parameter_of_a_default_variant_can_be_set_alone():
    config = validated(smallest(), ["algorithm.advantage.epsilon=1e-4"])
    assert config.algorithm.advantage.model_dump() == {"name": "grpo", "epsilon": 1e-4}


@pytest.mark.parametrize(
    ("preset", "override", "variant"),
    [
        ("dapo", "policy_loss.epsilon_low=0.1", {"name": "ppo_clip", "epsilon_low": 0.1, "epsilon_high": 0.28}),
        (
            "verl_grpo",
            "policy_loss.epsilon_high=0.28",
            {"name": "ppo_clip", "dual_clip": 3.0, "log_ratio_clamp": 20.0, "epsilon_high": 0.28},
        ),
        (
            "torchtune_ppo",
            "policy_loss.epsilon_high=0.3",
            {"name": "ppo_clip", "epsilon_low": 0.1, "epsilon_high": 0.3},
        ),
        (
            "trl_grpo",
            "advantage.zero_variance=rounding",
            {"name": "grpo", "epsilon": 1e-4, "zero_variance": "rounding"},
        ),
        ("lite_ppo", "advantage.epsilon=1e-4", {"name": "group_mean_batch_std", "epsilon": 1e-4}),
        ("ppo", "advantage.lambda_=1.0", {"name": "gae", "gamma": 1.0, "lambda_": 1.0}),
        ("gspo", "policy_loss.epsilon_low=1e-3", {"name": "gspo", "epsilon_low": 1e-3, "epsilon_high": 4e-4}),
        ("torchtune_ppo", "value.loss.clip_range=0.5", {"name": "value_clip", "clip_range": 0.5}),
        # No preset sets this field: the variant is the field's default.
        ("ppo", "value.aggregation.empty_rows=exclude", {"name": "token_mean", "empty_rows": "exclude"}),
    ],
)
def test_an_overridden_parameter_keeps_the_presets_variant_and_its_other_parameters(preset, override, variant):
    chosen, changed = f"algorithm.preset={preset}", f"algorithm.{override}"
    in_file = smallest() | {"algorithm": {"preset": preset}}
    field = override.partition("=")[0].split(".")[:-1]
    for values, overrides in ((smallest(), [chosen, changed]), (smallest(), [changed, chosen]), (in_file, [changed])):
        made = validated(values, overrides).model_dump()["algorithm"]
        for key in field:
            made = made[key]
        assert made == variant, overrides


def test_a_parameter_overrides_the_default_variant_where_the_preset_is_taken_out():
    values = smallest() | {"algorithm": {"preset": "ppo"}}
    for nothing in ("algorithm.preset=null", "algorithm={entropy_coefficient: 0.1}", "algorithm=null"):
        config = validated(values, [nothing, "algorithm.advantage.epsilon=1e-4"])
        assert config.algorithm.advantage.model_dump() == {"name": "grpo", "epsilon": 1e-4}, nothing


def test_a_preset_on_the_command_line_replaces_the_files_algorithm():
    config = load("deploy/runs/quickstart.yaml", ["algorithm.preset=ppo", "algorithm.kl.reward.coefficient=0.5"])
    assert config.algorithm.advantage.name == "gae" and config.algorithm.value is not None
    assert config.algorithm.kl.reward == KlRewardConfig(coefficient=0.5, estimator="k1")


def test_a_preset_of_null_takes_the_files_preset_out_and_nothing_else():
    values = smallest() | {"algorithm": {"preset": "grpo", "entropy_coefficient": 0.1}}
    config = validated(values, ["algorithm.preset=null"])
    assert config.algorithm.entropy_coefficient == 0.1
    assert config.algorithm.kl.loss is None


def test_null_gives_a_variant_its_default_back():
    values = smallest() | {"algorithm": {"advantage": "rloo", "preset": "ppo"}, "reward": {"judge": "regex"}}
    assert "(`algorithm.advantage=null` on the command line does)" in refusal(values)
    config = validated(values, ["algorithm.advantage=null", "reward.judge=null", "learner.lora=null"])
    assert config.algorithm.advantage.name == "gae"
    assert config.reward.judge.name == "exact_match" and config.learner.lora is None


@pytest.mark.parametrize(
    ("said", "max_length"),
    [
        ({}, 7),
        ({"environment": "single_turn"}, 7),
        ({"environment": {"name": "single_turn"}}, 7),
        ({"environments": {"a": "single_turn", "b": {"name": "single_turn"}}}, 7),
        ({"environments": {"a": "single_turn", "b": "guess"}}, 7 * 16),
        ({"environment": {"name": "guess", "top": 5}}, 7 * 16),
        ({"environment": "guess", "episodes": {"max_turns": 3}}, 7 * 3),
    ],
)
def test_dr_grpo_divides_by_the_most_tokens_that_a_trajectory_may_sample(said, max_length):
    """A constant, as the paper's: by the longest of each update, one long episode made all others of its update count less."""
    config = validated(smallest() | said | {"sampling": {"max_tokens": 7}, "algorithm": {"preset": "dr_grpo"}})
    assert config.algorithm.aggregation.params["max_length"] == max_length


def test_the_longest_completion_of_several_turns_is_not_known():
    algorithm = {"reward_shaping": [{"name": "overlong_penalty", "cache": 2}]}
    (shaping,) = validated(smallest() | {"environment": "guess", "algorithm": algorithm}).algorithm.reward_shaping
    assert shaping.params == {"cache": 2}


def test_a_setting_that_is_refused_does_not_hide_the_others():
    values = smallest() | {"environment": "guess", "episodes": {"max_turns": "x"}, "sampling": {"max_tokens": -1}}
    told = refusal(values | {"algorithm": {"preset": "dr_grpo", "entropy_coefficient": "y"}})
    assert all(name in told for name in ("episodes.max_turns", "sampling.max_tokens", "entropy_coefficient"))


@pytest.mark.parametrize(
    ("preset", "setting", "kept", "way_out"),
    [
        ("grpo", "kl", "{'loss': {'coefficient': 0.04, 'estimator': 'k3'}}", "algorithm.kl.loss=null"),
        ("dapo", "filters", "['zero_variance', 'overlong_mask']", "algorithm.filters=[]"),
        ("ppo", "advantage_shaping", "['whiten']", "algorithm.advantage_shaping=[]"),
        ("gspo", "proximal", "'recompute'", "algorithm.proximal=rollout"),
        ("torchrl_grpo", "entropy_coefficient", "0.01", "algorithm.entropy_coefficient=0.0"),
        ("on_policy_distillation", "kl.reward.credit", "'token'", "algorithm.kl.reward.credit=trajectory"),
        ("grpo", "kl.loss.coefficient", "0.04", "algorithm.kl.loss.coefficient=VALUE"),
    ],
)
def test_null_is_refused_where_the_presets_value_would_stay(preset, setting, kept, way_out):
    told = f"algorithm.{setting}=null leaves {kept} of algorithm.preset={preset!r} in force; write {way_out} instead"
    assert told in refusal(smallest() | {"algorithm": {"preset": preset}}, f"algorithm.{setting}=null")
    assert told in refusal(smallest(), f"algorithm.{setting}=null", f"algorithm.preset={preset}")


def test_the_ways_out_of_null_under_a_preset_leave_its_kl_and_its_filters_out():
    of_grpo = validated(smallest() | {"algorithm": {"preset": "grpo"}}, ["algorithm.kl.loss=null"])
    assert of_grpo.algorithm.kl.loss is None
    of_dapo = validated(smallest() | {"algorithm": {"preset": "dapo"}}, ["algorithm.filters=[]"])
    assert of_dapo.algorithm.filters == ()


def test_null_resets_a_section_or_list_that_the_preset_does_not_set():
    own = {"preset": "dapo", "kl": {"loss": {"coefficient": 0.1}}, "reward_shaping": ["clip"]}
    config = validated(smallest() | {"algorithm": own}, ["algorithm.kl=null", "algorithm.reward_shaping=null"])
    assert config.algorithm.kl.loss is None and config.algorithm.reward_shaping == ()


def test_null_does_not_stand_for_what_is_required():
    assert "model.path is missing" in refusal(smallest(), "model.path=null")


def test_a_file_in_another_encoding_says_so(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_bytes("run_dir: für mich".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"run.yaml is not UTF-8: .* save it as UTF-8"):
        load(file)


def test_a_missing_file_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read: No such file"):
        load(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("buffer.group_per_step=8", "buffer.group_per_step=8 is not a setting; did you mean buffer.groups_per_step?"),
        (
            "rollout.expert_parallel_size=2",
            "rollout.expert_parallel_size=2 is not a setting; did you mean rollout.tensor_parallel_size?",
        ),
        ("learning_rate=1", "learning_rate=1 is not a setting; did you mean optimizer.learning_rate?"),
        ("num_steps=many", "num_steps='many' is not valid: it must be a whole number"),
        ("num_steps=true", "num_steps=True is not valid: it must be a whole number (Length of the run in steps)"),
        ("record.keep_trajectories=true", "record.keep_trajectories=True is not valid: it must be a whole number ("),
        ("record.learned_groups=false", "record.learned_groups=False is not valid: it must be a whole number ("),
        ("optimizer.target_kl=true", "optimizer.target_kl=True is not valid: it must be a number ("),
        ("learner.stop_at_kl=true", "learner.stop_at_kl=True is not valid: it must be a number ("),
        ("optimizer.betas=[0.9, true]", "optimizer.betas.1=True is not valid: it must be a number"),
        ("sampling.logit_bias={5: true}", "sampling.logit_bias.5=True is not valid: it must be a number"),
        ("sampling.logit_bias={true: 5}", "sampling.logit_bias.1=True is not valid: it must be a whole number"),
        (
            "algorithm.kl.loss={coefficient: 0.1, log_ratio_clamp: true}",
            "algorithm.kl.loss.log_ratio_clamp=True is not valid: it must be a number (Clamp of the log-ratio",
        ),
        (
            "prompts={sources: {a: {name: file, weight: true}}}",
            "prompts.sources.a.weight=True is not valid: it must be a number",
        ),
        ("num_steps=2.5", "num_steps=2.5 is not valid: it must be a whole number"),
        ("optimizer.learning_rate=low", "optimizer.learning_rate='low' is not valid: it must be a number"),
        ("deterministic=maybe", "deterministic='maybe' is not valid: it must be true or false"),
        ("model.path=3", "model.path=3 is not valid: it must be a text"),
        ("sampling.stop=x", "sampling.stop='x' is not valid: it must be a list"),
        ("reward.parts=[regex]", "reward.parts=['regex'] is not valid: it must be a mapping"),
        ("reward.judge=5", "reward.judge=5 is not valid: it must be a name, or a mapping of name and parameters"),
        ("prompts=[a.jsonl]", "prompts=['a.jsonl'] is not valid: it must be a name, or a mapping of name and"),
        (
            "learner.lora=16",
            "learner.lora=16 is not valid: it must be a mapping of settings; there are: rank, alpha,",
        ),
        (
            "reward.parts={right: regex}",
            "reward.parts.right='regex' is not valid: it must be a mapping of settings; there are: judge, weight,",
        ),
        ("algorithm=grpo", "algorithm='grpo' is not valid: it must be a mapping of settings; there are: preset, "),
        ("Model={path: x}", "Model={'path': 'x'} is not a setting; did you mean model?"),
        ("run_dir=", "override 'run_dir=' has no value; write one, or run_dir=null for the default"),
        ("run_dir= ", "override 'run_dir= ' has no value"),
        ("num_steps=0", "num_steps=0 is not valid: input should be greater than 0"),
        (
            "rollout.num_workers=1000000",
            "rollout.num_workers=1000000 is not valid: input should be less than or equal to 100000",
        ),
        ("model.dtype=float8", "model.dtype='float8' is not valid: input should be 'auto', 'float32' or 'bfloat16'"),
        (
            "learner.num_ranks=513",
            "learner.num_ranks=513 is more than the 512 trajectories of an update; use fewer ranks",
        ),
        ("learner.lora.rank=0", "learner.lora.rank=0 is not valid: input should be greater than 0"),
        (
            "prompts={sources: {Ab-c: {name: file, weight: 0}}}",
            "prompts.sources.Ab-c.weight=0 is not valid: input should be gr",
        ),
        (
            "reward.parts={right: {judge: regex, wieght: 1}}",
            "reward.parts.right.wieght=1 is not a setting; did you mean reward.parts.weight?",
        ),
        ("prompts={path: a.jsonl}", "prompts: path='a.jsonl' is given without a name; write {name: NAME, path: ...}"),
        ("prompts={source: {}}", "prompts.source={} is not a setting; did you mean prompts.sources?"),
        ("prompts.difficulty.success_at=.nan", "prompts.difficulty.success_at=nan is not valid"),
        ("num_steps", "override 'num_steps' is not of the form"),
        ("num_steps.x=1", "num_steps={'x': 1} is not valid: it must be a whole number"),
        ("model.path=[", "cannot be read as YAML"),
        (
            "reward.judge.pattern=#### (.*)",
            """'reward.judge.pattern=#### (.*)': YAML takes all from '#' on for a comment; write "reward.judge.pattern='...'" with both """,
        ),
        (
            "prompts.system_prompt=End with #### 4",
            "'prompts.system_prompt=End with #### 4': YAML takes all from '#' on",
        ),
        ("reward.judge={name: x} # of mine", "override 'reward.judge={name: x} # of mine': YAML takes all from '#' on"),
        ("reward.judge.api_key=abc #d", "override 'reward.judge.api_key=<hidden>': YAML takes all from '#' on"),
        (
            "prompts.system_prompt=Think.\nAnswer.",
            "'prompts.system_prompt=Think.\\nAnswer.': YAML takes a line break in a text for a space; write \\n between double quotes",
        ),
        ("prompts.system_prompt='Think.\nAnswer.'", "YAML takes a line break in a text for a space"),
        ('prompts.system_prompt="Think.\nAnswer."', "YAML takes a line break in a text for a space"),
    ],
)
def test_a_mistake_names_field_value_and_way_out(override, advice):
    assert advice in refusal(smallest(), override)


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("model.path='a #b'", "a #b"),
        ("model.path=a#b", "a#b"),
        (r'model.path="a\nb"', "a\nb"),
        ("model.path=|\n  a\n  # b", "a\n# b"),
        ("model={path: a,\n dtype: float32}", "a"),
    ],
)
def test_an_override_says_a_hash_and_line_breaks_in_quotes(override, path):
    assert validated(smallest(), [override]).model.path == path


def test_true_and_false_that_stand_for_numbers_hide_no_other_mistake():
    told = refusal(smallest(), "record.keep_trajectories=true", "record.learned_groups=-1", "optimizer.target_kl=false")
    assert told.startswith("the configuration: 3 problems")


def test_true_and_false_are_read_where_a_setting_is_one_of_them():
    config = validated(
        smallest() | {"reward": {"parts": {"right": {"judge": "regex", "cache": True}}}}, ["deterministic=true"]
    )
    assert config.deterministic is True and config.reward.parts["right"].cache is True


def test_a_name_with_dots_in_a_file_is_a_mapping_of_settings():
    said = smallest() | {"sampling.max_tokens": 5, "sampling.x": 1}
    message = refusal(said)
    assert "sampling.max_tokens=5 is not a setting; write sampling: {max_tokens: ...}" in message
    assert "sampling.x=1 is not a setting; sampling has: max_tokens, " in message


def test_a_missing_section_is_told_with_what_it_needs():
    assert "model is missing; set model.path" in refusal({"prompts": "file"})


def test_all_mistakes_come_at_once():
    message = refusal({"model": {}, "prompts": "file", "sed": 1}, "num_steps=-1")
    assert "3 problems" in message
    assert "model.path is missing; set it (A Hugging Face folder, or a hub name)" in message
    assert "sed=1 is not a setting; did you mean seed?" in message
    assert "num_steps=-1" in message


def test_mistakes_in_overrides_and_in_the_algorithm_hide_no_others():
    message = refusal(smallest(), "algorithm.preset=grop", "num_steps=0", "seed", "model.path.x=[", "seed.x=1")
    lines = message.splitlines()
    assert lines[0] == "the configuration: 5 problems"
    starts = (
        "override 'seed' is not",
        "override 'model.path.x=['",
        "seed={'x': 1} is not valid",
        "algorithm.preset='grop' is",
    )
    for start in (*starts, "num_steps=0 is not valid"):
        assert sum(line.startswith(f"  {start}") for line in lines) == 1, start


def test_the_resolved_text_makes_the_same_run_again():
    config = validated(smallest(), ["learner.lora.rank=4", "reward.judge={name: regex, pattern: '[0-9]+'}"])
    assert validated(yaml.safe_load(resolved_yaml(config))) == config


def test_secrets_do_not_reach_the_resolved_text():
    prompts = {"name": "file", "api_key": "k-123", "path": "s3://user:word@bucket/a.jsonl", "max_tokens": 5}
    text = resolved_yaml(validated({**smallest(), "prompts": prompts}))
    assert "k-123" not in text and "user:word" not in text
    assert yaml.safe_load(text)["prompts"] == {
        "name": "file",
        "api_key": HIDDEN,
        "path": f"s3://{HIDDEN}@bucket/a.jsonl",
        "max_tokens": 5,
    }


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("openai_key", "sk-1", HIDDEN),
        ("Authorization", "Basic c2VjcmV0", HIDDEN),
        ("X-Api-Key", "sk-1", HIDDEN),
        ("apikey", "sk-1", HIDDEN),
        ("accessToken", "t-1", HIDDEN),
        ("dbPassword", "word", HIDDEN),
        ("passphrase", "word", HIDDEN),
        ("reward.judge.token", "t-1", HIDDEN),
        ("command", "--api-key=k-1", f"--api-key={HIDDEN}"),
        ("command", "judge.password=two words", f"judge.password={HIDDEN}"),
        ("url", "https://user:p@ss@host/a", f"https://{HIDDEN}@host/a"),
        ("url", "https://host/?mail=a@b", "https://host/?mail=a@b"),
        ("header", "authorization: bearer abc.def", f"authorization: bearer {HIDDEN}"),
        ("url", "https://judge/score?model=a&token=t-1&n=2", f"https://judge/score?model=a&token={HIDDEN}&n=2"),
        ("url", "https://a/b?X-Amz-Signature=f00&key=k-1", f"https://a/b?X-Amz-Signature={HIDDEN}&key={HIDDEN}"),
        ("header", "Authorization: Bearer abc.def", f"Authorization: Bearer {HIDDEN}"),
        ("note", "hf_" + "aB3" * 10, HIDDEN),
        ("note", "see sk-proj-" + "a_3" * 10 + ".", f"see {HIDDEN}."),
        ("note", "AKIA" + "A1B2" * 4, HIDDEN),
        ("note", "ghp_" + "aB3" * 12, HIDDEN),
        ("note", "github_pat_" + "aB3" * 12, HIDDEN),
        ("path", "my/task-classification-judge-7b", "my/task-classification-judge-7b"),
        ("path", "/models/sk-learn-based-judges-of-text", "/models/sk-learn-based-judges-of-text"),
        ("column", "hf_url", "hf_url"),
        ("answer_column", "monkey", "monkey"),
        ("max_tokens", "5", "5"),
        ("maxTokens", "5", "5"),
        ("template", "answer=42", "answer=42"),
        ("key", "answer", "answer"),
        ("reward.judge.answer_key", "solution", "solution"),
        ("stop_token", "</s>", "</s>"),
    ],
)
def test_a_secret_is_known_by_its_name_and_in_the_middle_of_a_text(name, value, shown):
    assert hidden({name: [value]}) == {name: [shown]}


def test_all_that_stands_below_a_secrets_name_is_hidden():
    held = {"user": "me", "pins": ["p-1"], "tries": 3}
    assert hidden({"credentials": held}) == {"credentials": {"user": HIDDEN, "pins": [HIDDEN], "tries": 3}}


def test_fields_of_a_json_schema_are_no_secrets():
    schema = {"type": "object", "properties": {"token": {"type": "string", "default": "hf_" + "aB3" * 10}}}
    shown = hidden({"json_schema": schema})["json_schema"]
    assert shown["properties"]["token"] == {"type": "string", "default": HIDDEN}


def test_a_run_that_begins_with_another_runs_file_needs_its_hidden_settings_again():
    judge, model = {"name": "mine:judge", "api_key": "k-1", "urls": ["http://me:pw@host"]}, {"path": "a <hidden> one"}
    written = yaml.safe_load(resolved_yaml(validated({**smallest(), "model": model, "reward": {"judge": judge}})))
    with pytest.raises(ConfigError, match=r"the value of reward\.judge\.api_key, reward\.judge\.urls is hidden there"):
        validated(written)
    again = validated(written, ["reward.judge.api_key=k-2", "reward.judge.urls=[http://host]"])
    assert again.reward.judge.params["api_key"] == "k-2" and again.model.path == "a <hidden> one"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(TRAPS) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(TRAPS), inner, max_size=3),
        max_leaves=6,
    )
)
def test_what_is_written_as_yaml_is_read_as_the_same(values):
    assert repr(parse(dumped(values), source="x")) == repr(values)  # True is not 1, and 1.0 is not either


def test_yaml_reads_numbers_and_words_as_people_mean_them():
    assert parse("[3e-4, 1e6, 1.5, .inf, on, no, true, 1_000]", source="x") == [
        3e-4, 1e6, 1.5, float("inf"), "on", "no", True, 1000,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10),
        ("-0x1F", -31),
        ("0o17", 15),
        ("+1_000", 1000),
        ("1:30", "1:30"),
        ("0b11", "0b11"),
        ("0x_", "0x_"),
        ("2020-13-45", "2020-13-45"),
        ("2020-12-24", "2020-12-24"),
        ("=", "="),
    ],
)
def test_whole_numbers_are_those_of_yaml_12_and_dates_are_texts(text, value):
    assert parse(text, source="x") == value


@pytest.mark.parametrize("text", ["!!int abc", "!!float abc", "!!bool abc", "!!timestamp abc", "9" * 5000])
def test_a_value_that_is_none_of_its_kind_is_named_with_its_line(text):
    with pytest.raises(
        ConfigError, match=r"x line 2, column 4 cannot be read as YAML: '.*' is not a value of its type"
    ):
        parse(f"a: 1\nb: {text}", source="x")


def test_a_merge_key_is_refused_by_its_name():
    with pytest.raises(
        ConfigError, match=r"x line 2, column 5 .*: '<<' is not supported, write out the mapping that it merges"
    ):
        parse("a: &a {x: 1}\nb: {<<: *a, y: 2}", source="x")


def test_an_override_is_of_its_own_place_where_a_file_says_something_by_an_anchor():
    held_out = {"name": "file", "path": "a.jsonl"}
    values = {**smallest(), "prompts": held_out, "evaluation": {"prompts": held_out}}
    config = validated(values, ["evaluation.prompts.path=b.jsonl"])
    assert config.prompts.params["path"] == "a.jsonl" and config.evaluation.prompts.params["path"] == "b.jsonl"


def test_a_key_given_twice_is_a_mistake():
    with pytest.raises(ConfigError, match=r"x line 1.*'a' is given twice"):
        parse("a: 1\na: 2", source="x")


def test_a_character_in_two_halves_as_json_writes_it_is_one():
    assert parse(r'system: "\ud83d\ude80 go"', source="x") == {"system": "🚀 go"}


def test_a_file_that_is_nested_too_deeply_is_one_clear_error():
    with pytest.raises(ConfigError, match=r"run\.yaml cannot be read as YAML: it is nested too deeply"):
        parse("[" * 2000, source="run.yaml")


def test_an_anchor_that_holds_itself_is_named_with_its_line():
    with pytest.raises(
        ConfigError, match=r"run\.yaml line 2, column 8 cannot be read as YAML: an anchor contains itself"
    ):
        parse("a: &a [1]\nmodel: &b {path: *a, b: *b}", source="run.yaml")
    assert parse("a: &a [1]\nb: *a\nc: {d: *a}", source="run.yaml") == {"a": [1], "b": [1], "c": {"d": [1]}}
