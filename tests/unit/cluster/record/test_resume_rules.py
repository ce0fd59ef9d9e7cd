"""Resources may change in the middle of a run, mathematics may not."""

from typing import Any

import pytest

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.hiding import HIDDEN
from cluster.record.resume_rules import check_same_run, differing, rows_named, when_it_may_change, with_new_settings


def resolved(**settings: Any) -> dict[str, Any]:
    return RunConfig.model_validate({"model": {"path": "m"}, "prompts": "file", **settings}).model_dump(mode="json")


RESOURCES = {
    "learner": {
        "max_tokens_per_micro_batch": 1,
        "activation_checkpointing": True,
        "head_chunk_tokens": 1,
        "kept_logits_bytes": 1,
        "packing": "padded",
        "num_ranks": 2,
        "max_non_finite_updates": 1,
        "timeout_s": 1,
    },
    "rollout": {
        "num_workers": 2,
        "kv_cache_bytes": 1,
        "max_concurrent_sequences": 1,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": False,
        "prefix_caching": False,
    },
    "reward": {"max_concurrency": 1, "timeout_s": 1},
    "buffer": {"max_size_bytes": 1},
    "reference": {"max_tokens_per_micro_batch": 1},
    "weights": {"bucket_bytes": 1, "canary_tolerance": 1},
    "mismatch": {"alarm_nats": 1, "stop_nats": 2},
    "supervision": {"hang_s": 1},
    "checkpoint": {"every_steps": 1},
    "evaluation": {"num_prompts": 1},
    "metrics": {"sinks": ["jsonl"]},
}


def test_resources_may_change_among_them_what_the_out_of_memory_message_advises():
    assert differing(resolved(), resolved(**RESOURCES)) == {}


def test_settings_that_came_later_have_their_defaults_in_an_earlier_run():
    """Seen in review: no run of 0.2.0 could be resumed, for a setting that it could not have."""
    theirs = resolved()
    del theirs["rollout"]["routing_replay"], theirs["algorithm"]["entropy_coefficient"]
    assert differing(with_new_settings(theirs), resolved()) == {}
    changed = differing(with_new_settings(theirs), resolved(algorithm={"entropy_coefficient": 0.1}))
    assert changed == {"algorithm.entropy_coefficient": (0.0, 0.1)}


def test_settings_that_this_version_refuses_are_compared_as_they_are():
    theirs = {**resolved(), "gone_since": 1}
    assert differing(with_new_settings(theirs), resolved()) == {"gone_since": (1, None)}


def test_a_resumed_run_may_compile_its_layers():
    # A deterministic run may not at all.
    assert differing(resolved(), resolved(learner={"compile": True})) == {}


def test_in_a_deterministic_run_the_layout_may_not_change():
    changed = differing(resolved(deterministic=True), resolved(deterministic=True, **RESOURCES))
    assert {"learner.max_tokens_per_micro_batch", "learner.num_ranks", "rollout.num_workers"} <= changed.keys()
    assert (
        not {"learner.timeout_s", "reward.timeout_s", "mismatch.alarm_nats", "checkpoint.every_steps"} & changed.keys()
    )


def test_a_refused_layout_says_that_the_run_is_deterministic():
    theirs, ours = resolved(deterministic=True), resolved(deterministic=True, learner={"num_ranks": 2})
    with pytest.raises(ConfigError, match=r"num_ranks is 1 there and 2 here \(fixed by deterministic=true\); name"):
        check_same_run(theirs, ours, run_dir="r")


def test_mathematics_may_not_change_a_variants_parameters_included():
    theirs = resolved(reward={"judge": {"name": "regex", "pattern": "a"}}, learner={"lora": {"rank": 4}})
    ours = resolved(reward={"judge": {"name": "regex", "pattern": "b"}}, seed=1)
    assert differing(theirs, ours).keys() == {
        "reward.judge.pattern",
        "learner.lora.rank",
        "learner.lora.alpha",
        "learner.lora.dropout",
        "learner.lora.target_modules",
        "seed",
    }


@pytest.mark.parametrize(("schedule", "changed"), [("constant", set()), ("linear", {"num_steps"})])
def test_a_run_gets_longer_where_its_learning_rates_do_not_depend_on_it(schedule, changed):
    optimizer = {"schedule": schedule}
    ours = resolved(optimizer=optimizer, num_steps=200, learner={"timeout_s": 1})
    assert differing(resolved(optimizer=optimizer), ours).keys() == changed


def test_a_refused_number_of_steps_says_that_the_schedule_ends_with_them():
    theirs, ours = (resolved(optimizer={"schedule": "cosine"}, num_steps=number) for number in (100, 200))
    with pytest.raises(
        ConfigError, match=r"num_steps is 100 there and 200 here \(fixed by optimizer.schedule=cosine\); name"
    ):
        check_same_run(theirs, ours, run_dir="r")


def limited(most: int | None, on_long: str) -> dict[str, Any]:
    return resolved(prompts={"name": "file", "path": "p", "max_prompt_tokens": most, "on_long_prompt": on_long})


@pytest.mark.parametrize(
    ("was", "now", "refused"),
    [
        ((100, "error"), (100, "drop"), set()),
        ((100, "error"), (100, "truncate_start"), set()),
        ((100, "error"), (200, "drop"), set()),
        ((100, "error"), (200, "error"), set()),
        ((100, "error"), (None, "error"), set()),
        ((100, "error"), (99, "error"), {"max_prompt_tokens"}),
        ((None, "error"), (100, "drop"), {"max_prompt_tokens"}),
        ((100, "drop"), (100, "error"), {"on_long_prompt"}),
        ((100, "truncate_end"), (100, "drop"), {"on_long_prompt"}),
        ((100, "drop"), (200, "drop"), {"max_prompt_tokens"}),
    ],
)
def test_a_run_that_a_long_prompt_ended_resumes_with_what_the_error_advises(was, now, refused):
    """Seen before: both ways out were refused, and only another data set was left."""
    assert differing(limited(*was), limited(*now)).keys() == {f"prompts.{name}" for name in refused}


def test_of_another_variant_its_name_alone_differs():
    theirs = resolved(reward={"judge": {"name": "regex", "pattern": "a"}})
    assert differing(theirs, resolved(reward={"judge": {"name": "other", "limit": 3}})).keys() == {"reward.judge.name"}


def test_the_same_run_is_not_refused_and_one_difference_is_told_in_the_sentence():
    check_same_run(resolved(), resolved(), run_dir="r")
    with pytest.raises(ConfigError) as refused:
        check_same_run(resolved(), resolved(seed=1), run_dir="r")
    assert str(refused.value) == (
        "run_dir='r' belongs to another configuration: seed is 0 there and 1 here; name another run_dir, or set it back to resume that run"
    )


def test_a_refusal_shows_every_difference():
    theirs, ours = resolved(), resolved(seed=1, optimizer={"learning_rate": 0.1})
    with pytest.raises(ConfigError) as refused:
        check_same_run(theirs, ours, run_dir="r")
    assert str(refused.value).splitlines()[1:] == [
        "  optimizer.learning_rate is 1e-06 there and 0.1 here",
        "  seed is 0 there and 1 here",
    ]


@pytest.mark.parametrize(
    ("name", "when"),
    [
        ("seed", "no"),
        ("learner.num_ranks", "unless deterministic"),
        ("mismatch", "yes"),
        ("num_steps", "with a constant schedule"),
        ("prompts.max_prompt_tokens", "upwards, from `error`"),
        ("prompts.on_long_prompt", "from `error`"),
        ("prompts.deduplicate", "no"),
    ],
)
def test_the_documentation_says_when(name, when):
    assert when_it_may_change(name) == when


def test_rows_of_prompts_are_the_same_in_every_run_directory():
    """Seen in review: a copied run was refused, since its rows lay in another folder, though `run_dir` may change."""

    def of(folder: str, content: bytes) -> dict[str, Any]:
        return resolved(prompts={"name": "file", "path": f"{folder}/{rows_named(content)}"})

    assert differing(of("runs/two", b"1"), of("s3://bucket/three", b"1")) == {}
    assert differing(of("runs/two", b"1"), of("runs/two", b"2")).keys() == {"prompts.path"}
    files = [resolved(prompts={"name": "file", "path": f"{folder}/p.jsonl"}) for folder in ("two", "three")]
    assert differing(*files).keys() == {"prompts.path"}


def test_two_paths_to_one_folder_are_one_model(tmp_path, monkeypatch):
    """`make train` names the small model by a relative path, `treadwheel quickstart` by a whole one."""
    monkeypatch.chdir(tmp_path)
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
    whole = resolved(model={"path": str(tmp_path / "model")})
    assert differing(resolved(model={"path": "model"}), whole) == {}
    assert differing(resolved(model={"path": "./model"}), whole) == {}
    assert differing(resolved(model={"path": "other"}), whole) == {"model.path": ("other", str(tmp_path / "model"))}
    (tmp_path / "model").rmdir()
    assert "model.path" in differing(resolved(model={"path": "model"}), whole), "nobody knows what stood there"


def test_a_value_that_an_earlier_version_hid_is_no_difference():
    before, now = (
        resolved(reward={"judge": {"name": "mine:judge", "answer_key": each}}) for each in (HIDDEN, "answer")
    )
    assert differing(before, now) == {}
    assert differing(now, before).keys() == {"reward.judge.answer_key"}
