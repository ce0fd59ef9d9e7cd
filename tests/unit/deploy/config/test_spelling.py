"""A run is the same however its variants are written down."""

import functools
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


def test_a_variant_that_is_not_here_is_compared_as_it_is_written():
    own = "my_missing.rewards:judge"
    assert changed(f"reward.judge={own}") == {"reward.judge.name": ("exact_match", own)}


def test_every_setting_that_names_a_variant_is_spelled_out():
    source = "{name: file, path: b.jsonl}"
    written = validated(dict(RUN), [f"evaluation.prompts={source}", f"algorithm.sft.prompts={source}"])
    spelled = spelled_out(written.model_dump(mode="json"))
    for name in (name for name, field in fields(RunConfig) if "Plugin" in str(field.annotation)):
        value = functools.reduce(lambda section, key: (section or {}).get(key), name.split("."), spelled)
        for each in value if isinstance(value, list) else [value]:
            assert each is None or isinstance(each, dict), f"{name}={each!r} is not spelled out"
