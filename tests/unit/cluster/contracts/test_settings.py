"""Every setting says what it decides."""

import math

import pytest

from cluster.contracts.config import RunConfig
from cluster.contracts.settings import Layout, Mark, Resources, Section, fields, flat, in_words, marks, section_in


class Engine(Section):
    num_threads: Layout[int] = 1
    timeout_s: Resources[float | None] = None
    forgotten: int = 0


class Sampling(Section, mark=Mark.MATHEMATICS):
    top_k: int = 0
    batch: Layout[int] = 1


class Run(Section):
    engine: Engine = Engine()
    sampling: Sampling | None = None


def test_a_mark_is_the_fields_own_or_its_sections_default():
    assert dict(marks(Run)) == {
        "engine": None,
        "engine.num_threads": Mark.LAYOUT,
        "engine.timeout_s": Mark.RESOURCES,
        "engine.forgotten": None,
        "sampling": Mark.MATHEMATICS,
        "sampling.top_k": Mark.MATHEMATICS,
        "sampling.batch": Mark.LAYOUT,
    }


def test_every_setting_of_a_run_is_marked():
    sections = {
        name for name, field in fields(RunConfig) if section_in(field) is not None and field.default is not None
    }
    unmarked = [name for name, mark in marks(RunConfig) if mark is None and name not in sections]
    assert unmarked == [], "mark them where they are declared: Mathematics[...], Layout[...] or Resources[...]"


@pytest.mark.parametrize(
    ("name", "mark"),
    [
        ("sampling.max_tokens", Mark.MATHEMATICS),
        ("prompts", Mark.MATHEMATICS),
        ("reward.judge", Mark.MATHEMATICS),
        ("reward.timeout_s", Mark.RESOURCES),
        ("learner.lora", Mark.MATHEMATICS),
        ("learner.max_tokens_per_micro_batch", Mark.LAYOUT),
        ("rollout.on_update", Mark.LAYOUT),
        ("mismatch.alarm_nats", Mark.RESOURCES),
    ],
)
def test_what_a_setting_of_a_run_decides(name, mark):
    assert dict(marks(RunConfig))[name] is mark


def test_nested_values_have_full_names():
    assert dict(flat({"a": {"b": {"c": 1}, "d": [2]}, "e": None})) == {"a.b.c": 1, "a.d": [2], "e": None}


def test_a_number_that_json_does_not_know_becomes_a_word():
    told = in_words({"low": -math.inf, "of": [math.nan, 1.5], "name": "inf", "given": (math.inf, None)})
    assert told == {"low": "-inf", "of": ["nan", 1.5], "name": "inf", "given": ["inf", None]}
