"""A run is the same however its variants are written down."""

import functools
import json
from typing import Any

import pytest
import yaml

from cluster.contracts.config import RunConfig
from cluster.contracts.settings import fields
from cluster.record.resume_rules import differing
from deploy.config.loading import resolved_yaml, validated
from deploy.config.spelling import spelled_out

RUN = {"model": {"path": "none"}, "prompts": {"name": "file", "path": "a.jsonl"}}


def changed(*overrides: str) -> dict[str, Any]:
    """What a resumed run is told that these change."""
    theirs, ours = (yaml.safe_load(resolved_yaml(validated(dict(RUN), each))) for each in ((), overrides))
    return differing(spelled_out(theirs), spelled_out(ours))


def test_a_default_that_is_written_out_changes_nothing():
    assert changed("reward.judge={name: exact_match, column: answer}", "prompts.text_as=auto") == {}
    assert changed("algorithm.policy_loss={name: ppo_clip, epsilon_low: 0.2}") == {}


def test_a_parameter_that_is_changed_is_named_alone_with_the_default_that_it_had():
    assert changed("reward.judge={name: exact_match, column: solution}") == {
        "reward.judge.column": ("answer", "solution")
    }


def test_parameters_in_a_list_of_variants_count():
    assert changed("algorithm.filters=[zero_variance]").keys() == {"algorithm.filters"}


@pytest.mark.parametrize("field", ["prompts", "evaluation.prompts"])
def test_a_default_that_is_written_out_in_a_source_of_several_changes_nothing(field):
    def several(**written):
        source = {"name": "file", "path": "a.jsonl", **written}
        run = validated({"model": {"path": "none"}, "prompts": "file"}, [f"{field}={{sources: {{maths: {source}}}}}"])
        return spelled_out(yaml.safe_load(resolved_yaml(run)))

    assert several() == several(text_as="auto") != several(text_as="text")


def test_a_default_of_several_values_that_is_written_out_changes_nothing():
    """In Python a tuple, in YAML a list."""

    def gym(**written):
        environment = {"name": "gym", "id": "a", **written}
        return spelled_out(yaml.safe_load(resolved_yaml(validated({**RUN, "environment": environment}))))

    assert gym() == gym(actions=[]) != gym(actions=["up"])


def test_a_variant_that_is_not_here_is_compared_as_it_is_written():
    own = "my_missing.rewards:judge"
    assert changed(f"reward.judge={own}") == {"reward.judge.name": ("exact_match", own)}


ALL = {
    "evaluation.prompts": "file",
    "algorithm.sft.prompts": "file",
    "episodes.parser": "my_parsers:read",
    "algorithm.advantage": "gae",
    "algorithm.value": {"loss": "value_clip", "aggregation": "token_mean"},
    "algorithm.reward_shaping": ["reward_clip"],
    "algorithm.advantage_shaping": ["whiten"],
    "algorithm.selection": "max_variance",
    "rollout.extra_trajectories": 1,
    "algorithm.filters": ["zero_variance"],
    "algorithm.corrections": ["tis"],
    "algorithm.proximal": "recompute",
}
ONE = {"environment": "guess"}
SEVERAL = {
    "environments": {"a": "guess"},
    "episodes.column": "kind",
    "reward.parts": {"right": {"judge": "exact_match"}},
}


def test_every_setting_that_names_a_variant_is_spelled_out():
    """Each is given by its name alone, in one of two runs: some are instead of others."""
    spelled = set[str]()
    for more in (ONE, SEVERAL):
        run = validated(
            {**RUN, "prompts": "file"}, [f"{name}={json.dumps(value)}" for name, value in (ALL | more).items()]
        )
        written = run.model_dump(mode="json")
        for name in variants():
            before, after = (of(values, name) for values in (written, spelled_out(written)))
            assert all(
                isinstance(each, dict) and each["name"] == was for each, was in zip(after, before, strict=True)
            ), name
            spelled |= {name} if after else set()
    assert spelled == {*variants()}


def variants() -> list[str]:
    return [name for name, field in fields(RunConfig) if "Plugin" in str(field.annotation)]


def of(run: dict[str, Any], name: str) -> list[Any]:
    """All variants that a setting names: one, several, or several by names of their own."""
    if name == "reward.parts.judge":
        return [part["judge"] for part in run["reward"]["parts"].values()]
    value = functools.reduce(lambda section, key: (section or {}).get(key), name.split("."), run)
    if name == "environments":
        return [*value.values()]
    return value if isinstance(value, list) else [] if value is None else [value]
