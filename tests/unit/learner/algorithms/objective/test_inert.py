"""Every option acts or is refused: on batches with groups of all sorts, and on the step after it."""

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from torch import Tensor

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.errors import ConfigError, DataError
from learner.algorithms.objective import Objective
from learner.algorithms.registry.homes import HOMES
from learner.algorithms.registry.presets import PRESETS, expand
from tests.unit.learner.algorithms import options
from tests.unit.learner.algorithms.batches import Case, mixed

pytestmark = pytest.mark.slow  # all of every variant

OF_THE_LEARNER = (
    "monitor.", "sft.", "proximal_decay", "distillation.top_k", "router_aux_loss_coefficient",
    "value.backbone", "value.path", "value.revision", "value.trust_remote_code", "value.learning_rate", "value.warmup_steps",
)  # fmt: skip
"""They say what the learner builds, averages, looks at, imitates, asks of routers and when it steps, and are no part of the loss of a
batch."""

OF_THE_LOSS = [field for field in HOMES if field != "selection"]
"""A selection chooses what is in the batch, before there is one."""

CRITIC: dict[str, Any] = {"advantage": "gae", "value": {}}
RECOMPUTED: dict[str, Any] = {"proximal": "recompute"}
TAUGHT: dict[str, Any] = {"advantage": "none", "kl": {"loss": {"coefficient": 0.1}}}
"""Its policy loss is 0."""
CONTEXTS: dict[str, dict[str, Any]] = {
    "value.loss": CRITIC,
    "value.aggregation": CRITIC,
    "corrections": RECOMPUTED,
    "advantage_shaping": {"advantage": "raw_reward"},  # where groups without variance have an advantage to shape
}
"""What a field's variants are tried in."""


CASES = [mixed(0), mixed(1, single=True, positive=True), mixed(2, constant=True)]


def at_start(whole: Case) -> Case:
    """As a step's first update finds it: policy and values are still the old ones."""
    batch = replace(whole.batch, proximal_logprobs_NT=whole.policy, values_NT=whole.values)
    return Case(batch, whole.policy, whole.entropies, whole.values)


class Effect:
    """What a run of a section does on each batch in turn, found out when it is asked for: what it says, or loss and gradients."""

    def __init__(self, section: dict[str, Any], *, updates_per_step: int) -> None:
        config = AlgorithmConfig.model_validate(section)
        self._objective = Objective.from_config(config, updates_per_step=updates_per_step)
        self._batches = iter(CASES if updates_per_step > 1 else map(at_start, CASES))
        self._found: list[list[Tensor]] = []

    def on(self, index: int) -> list[Tensor]:
        while len(self._found) <= index:
            self._found.append(self._next(next(self._batches)))
        return self._found[index]

    def _next(self, whole: Case) -> list[Tensor]:
        try:
            loss, report, gradient = whole.loss(self._objective)
        except DataError as error:
            return [torch.tensor(list(str(error).encode()))]
        found = [loss, gradient]
        if self._objective.config.value is not None:
            found += [whole.value_gradient(self._objective)]
        self._objective.observe(report)
        return found


@functools.cache
def effect(section: str, updates_per_step: int) -> Effect | None:
    """None: it is refused."""
    try:
        return Effect(json.loads(section), updates_per_step=updates_per_step)
    except (ConfigError, ValidationError):
        return None


def acts(section: dict[str, Any], *, against: dict[str, Any], updates_per_step: int = 2) -> bool | None:
    """Whether it differs from its neighbour; None: one of them is refused."""
    a, b = (effect(json.dumps(each, sort_keys=True), updates_per_step) for each in (section, against))
    if a is None or b is None:
        return None
    return any(differ(a.on(index), b.on(index)) for index in range(len(CASES)))


def differ(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) != len(b) or not all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def parameters(field: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for variant in options.variants(field):
        needs_critic = {"gae": CRITIC}.get(variant["name"], {}) if field == "advantage" else {}
        context = CONTEXTS.get(field, {}) | needs_critic
        if "proximal_logprobs" in _asks(variant, field):
            context |= RECOMPUTED
        for before, changed in options.changes_of(variant, field):
            yield options.with_set(context, field, before), options.with_set(context, field, changed)


def _asks(variant: dict[str, Any], field: str) -> str:
    from cluster.contracts.plugins import Plugin
    from learner.algorithms.registry.variants import Variant

    return " ".join(Variant.from_plugin(Plugin.model_validate(variant), field=field).asks)


@pytest.mark.parametrize("field", OF_THE_LOSS)
def test_every_parameter_of_every_variant_acts_or_is_refused(field):
    inert = [changed for before, changed in parameters(field) if acts(changed, against=before) is False]
    assert inert == []


@pytest.mark.parametrize("field", ["policy_loss", "value.loss"])
def test_every_parameter_acts_or_is_refused_where_a_step_makes_one_update(field):
    tried = [each for each in parameters(field) if None not in _variant(each[1], field).values()]
    inert = [changed for before, changed in tried if acts(changed, against=before, updates_per_step=1) is False]
    assert inert == []


@pytest.mark.parametrize("field", OF_THE_LOSS)
def test_what_is_refused_beside_defaults_acts_elsewhere(field):
    """No parameter is dead: another parameter of its variant, or another part, lets it act."""
    refused = [(before, changed) for before, changed in parameters(field) if acts(changed, against=before) is None]
    dead = [changed for before, changed in refused if not any(_elsewhere(field, before, changed))]
    assert dead == []


def _elsewhere(field: str, before: dict[str, Any], changed: dict[str, Any]) -> Iterator[bool | None]:
    """Whether it acts beside filters, and beside each other parameter of its variant."""
    filters = {"filters": ["overlong_mask"]}
    yield acts(changed | filters, against=before | filters)
    variant, with_change = _variant(before, field), _variant(changed, field)
    for _, other in options.changes_of(variant, field):
        one, another = variant | other, other | with_change
        yield acts(options.with_set(changed, field, another), against=options.with_set(before, field, one))


def _variant(section: dict[str, Any], field: str) -> dict[str, Any]:
    found = functools.reduce(lambda inner, key: inner[key], field.split("."), section)
    return found[0] if isinstance(found, list) else found


def contexts() -> list[dict[str, Any]]:
    """The defaults, a critic, a loss or advantage for each set of tensors that one asks for, and no advantage: no other difference decides
    what acts."""
    found: dict[str, dict[str, Any]] = {}
    for field in ("policy_loss", "advantage"):
        for variant in options.variants(field):
            beside = {"value": {}} if variant["name"] == "gae" else {}
            found.setdefault(_asks(variant, field), {field: variant} | beside)
    return [{}, *found.values(), TAUGHT]


def of_the_loss() -> list[tuple[str, FieldInfo]]:
    return [(path, field) for path, field in options.settings() if not path.startswith(OF_THE_LEARNER)]


def settings() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each setting in each context: its name, the section without it, the section with it."""
    kl = {name: {"coefficient": 0.1, "estimator": "k3"} for name in ("loss", "reward", "rollout")}
    for path, field in of_the_loss():
        for context in contexts():
            if path.startswith("value.") and "value" not in context:
                continue
            beside = context | ({"kl": kl} if path.startswith("kl.") else {})
            changed = [options.with_set(beside, path, value) for value in options.values_of(path, field)]
            yield from ((path, beside, each) for each in changed if each != beside)


def test_every_setting_acts_or_is_refused_and_acts_somewhere():
    seen = [(path, changed, acts(changed, against=before)) for path, before, changed in settings()]
    assert [path for path, _, does in seen if does is False] == []
    assert {path for path, _, does in seen if does} == {path for path, _ in of_the_loss()}


@pytest.mark.parametrize("field", ("reward_shaping", "advantage_shaping", "filters", "corrections"))
def test_every_part_acts_or_is_refused_beside_every_kind_of_loss_and_advantage(field):
    tried = [(context, variant) for context in contexts() for variant in options.variants(field)]
    inert = [each for each in tried if acts(options.with_set(each[0], field, each[1]), against=each[0]) is False]
    assert inert == []


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"reward_placement": "every_token"},
            r"reward_placement='every_token' changes nothing: advantage='grpo', policy_loss='ppo_clip' do not ask for rewards per token",
        ),
        (
            {"policy_loss": "reinforce", "proximal": "recompute"},
            r"proximal='recompute' changes nothing: .* do not ask for the log-probs of π_old; leave proximal out",
        ),
        (
            {
                "policy_loss": "reinforce",
                "proximal": "recompute",
                "kl": {"loss": {"coefficient": 0.1, "estimator": "unbiased"}},
            },
            r"proximal='recompute' changes nothing",  # its ratio is to the policy that sampled
        ),
        (
            {"proximal": "recompute", "proximal_decay": 0.5},
            r"proximal_decay=0.5 changes nothing while proximal='recompute'; leave it out, or set that to 'ewma'",
        ),
        (
            {"policy_loss": "reinforce", "proximal": "ewma", "proximal_decay": 0.5},
            r"proximal='ewma' changes nothing",
        ),
        (
            {"advantage": {"name": "cpgd", "epsilon": 0.1}},
            r"advantage.epsilon=0.1 changes nothing while advantage.center='mean'; leave it at 1e-08, or change the other",
        ),
        (
            {"aggregation": {"name": "sequence_mean", "empty_rows": "count"}},
            r"aggregation.empty_rows='count' changes nothing while filters=\[\]; leave it at 'exclude'",
        ),
        (
            {"proximal": "recompute", "policy_loss": {"name": "gspo", "epsilon_low": 0.1}},
            r"policy_loss.epsilon_low=0.1 can never act: a step of one update .* learner.mini_batches or learner.epochs above 1",
        ),
        (
            {"value": {"warmup_steps": 2}},
            r"value changes nothing: advantage='grpo' and the other parts do not read the critic's values; leave value out",
        ),
        (
            CRITIC | {"value": {"loss": {"name": "value_clip", "clip_range": 0.1}}},
            r"value.loss.clip_range=0.1 can never act",
        ),
    ],
)
def test_an_option_that_cannot_act_is_refused_with_its_field_value_and_way_out(section, message):
    with pytest.raises(ConfigError, match=message):
        Objective.from_config(AlgorithmConfig.model_validate(section))


@pytest.mark.parametrize(
    "loss",
    [
        {"name": "dro", "beta": 0.5}, {"name": "kl_cov", "cov_share": 0.1}, {"name": "kl_cov", "kl_coefficient": 0.5},
        {"name": "sapo", "tau_positive": 2.0}, {"name": "sapo", "tau_negative": 2.0},
    ],
)  # fmt: skip
def test_what_changes_no_gradient_at_ratio_one_is_refused_where_a_step_makes_one_update(loss):
    with pytest.raises(ConfigError, match=r"can never act: a step of one update"):
        Objective.from_config(AlgorithmConfig.model_validate(RECOMPUTED | {"policy_loss": loss}))


@pytest.mark.parametrize(
    "loss",
    [
        {"name": "cispo", "epsilon_max": 0.5},
        {"name": "cispo", "epsilon_min": 1.5},
    ],
)
def test_a_bound_that_leaves_out_ratio_one_acts_in_a_step_of_one_update(loss):
    bounded, plain = (RECOMPUTED | {"policy_loss": each} for each in (loss, loss["name"]))
    assert acts(bounded, against=plain, updates_per_step=1)


def test_plain_squared_error_of_values_may_be_asked_for_in_a_step_of_one_update():
    section = CRITIC | {"value": {"loss": {"name": "value_clip", "clip_range": None}}}
    assert Objective.from_config(AlgorithmConfig.model_validate(section)).config.value is not None


def test_bounds_act_where_a_step_makes_several_updates():
    bounded = {"name": "gspo", "epsilon_low": 0.1}
    section = AlgorithmConfig.model_validate(RECOMPUTED | {"policy_loss": bounded})
    assert Objective.from_config(section, updates_per_step=2).config.policy_loss.params == {"epsilon_low": 0.1}


@pytest.mark.parametrize("policy_loss", [loss["name"] for loss in options.variants("policy_loss")])
def test_a_policy_loss_acts_without_an_advantage_or_is_refused(policy_loss):
    does = acts(TAUGHT | {"policy_loss": policy_loss}, against=TAUGHT)
    assert does is (True if policy_loss == "dro" else False if policy_loss == "ppo_clip" else None)


@pytest.mark.parametrize(
    "fields",
    [
        {"policy_loss": {"name": "ppo_clip", "epsilon_high": 0.5}},
        {"proximal": "recompute"},
        {"corrections": ["opsm"]},
        {"advantage_shaping": ["whiten"]},
        {"advantage_shaping": [{"name": "advantage_clip", "low": -1.0, "high": 1.0}]},
        {"filters": ["overlong_mask", "high_entropy_tokens"]},
    ],
)
@pytest.mark.parametrize("teacher", [TAUGHT, {"advantage": "none", "distillation": {}}])
def test_what_only_a_policy_loss_of_0_reads_is_refused(fields, teacher):
    (field,) = fields
    with pytest.raises(ConfigError, match=rf"{field}.* changes nothing: with advantage='none' and without kl.reward"):
        Objective.from_config(_config(teacher | fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"kl": {"reward": {"coefficient": 0.1, "credit": "token"}}, "policy_loss": "gspo", "proximal": "recompute"},
        {"policy_loss": "dro", "proximal": "recompute", "corrections": ["tis"]},
        {"advantage_shaping": [{"name": "advantage_clip", "low": 0.5, "high": 1.0}], "policy_loss": "gspo"},
        {"filters": ["overlong_mask"]},
    ],
)
def test_what_makes_an_advantage_of_0_act_is_accepted(fields):
    assert Objective.from_config(_config(TAUGHT | fields), updates_per_step=2).config.advantage.name == "none"


@pytest.mark.parametrize(
    ("lag", "fields"), [(0, {}), (1, {"corrections": ["decoupled"]}), (2, None), (1, {"policy_loss": "kl_cov"})]
)
def test_an_approximation_of_pi_old_needs_tokens_of_two_steps_ago(lag, fields):
    """Up to a lag of 1 it is μ; losses of covariances rank tokens by the policy that begins the step."""
    section = _config({"proximal": "approximate"} | (fields or {}))
    if fields is None or "policy_loss" in fields:
        assert Objective.from_config(section, max_lag=lag).config.proximal == "approximate"
        return
    assert Objective.from_config(section).config.proximal == "approximate", "the tokens of a record may be older"
    message = rf"proximal='approximate' changes nothing while buffer.max_off_policy_steps={lag}.*'recompute'.*2 or more"
    with pytest.raises(ConfigError, match=message):
        Objective.from_config(section, max_lag=lag)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"advantage_shaping": ["group_weights"]}, r"advantage_shaping\[0\]='group_weights' changes nothing"),
        ({"advantage": {"name": "grpo", "zero_variance": "rounding"}}, "advantage.zero_variance='rounding' changes"),
    ],
)
def test_what_treats_groups_without_variance_is_refused_where_a_filter_drops_them(fields, message):
    filtered = fields | {"filters": ["zero_variance"]}
    with pytest.raises(ConfigError, match=rf"{message}.*filters\[0\]='zero_variance'.*leave one of them out"):
        Objective.from_config(_config(filtered))
    # Over the batch, shaping may make rewards equal that the filter saw differ.
    part = {"name": "running_norm", "part": "format"}
    assert Objective.from_config(_config(filtered | {"reward_shaping": [part]}))
    assert Objective.from_config(_config(fields))


@pytest.mark.parametrize("filters", [["zero_variance"], ["high_entropy_tokens"]])
def test_a_way_to_count_empty_rows_is_refused_where_no_filter_empties_one(filters):
    section = {"aggregation": {"name": "sequence_mean", "empty_rows": "count"}, "filters": filters}
    with pytest.raises(ConfigError, match=rf"empty_rows='count' changes nothing while filters=\['{filters[0]}'\]"):
        Objective.from_config(_config(section))
    kept = {"name": "high_entropy_tokens", "denominator": "kept"}
    assert Objective.from_config(_config(section | {"filters": [*filters, kept]}))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_says_nothing_that_its_other_settings_make_inert(preset):
    """Each of its settings is a default for the reader, or makes another algorithm of the rest."""
    whole = expand({"preset": preset})
    spoken = Objective.from_config(AlgorithmConfig.model_validate(whole)).formula()
    for field in AlgorithmConfig.model_validate(whole).model_dump(exclude_defaults=True):
        rest = {name: value for name, value in whole.items() if name != field}
        does = acts(whole, against=rest)
        assert does is not False or spoken[field] == Objective.from_config(_config(rest)).formula()[field], field


def _config(section: dict[str, Any]) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(section)
