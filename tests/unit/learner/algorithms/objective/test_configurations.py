"""Any algorithm section that is accepted: it trains, in every layout alike, and says what it is."""

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.errors import ConfigError
from learner.algorithms.objective import Objective
from learner.algorithms.registry.homes import HOMES
from tests.unit.learner.algorithms import options
from tests.unit.learner.algorithms.batches import Case, mixed

pytestmark = pytest.mark.slow

VOCABULARY = 5
LISTS = ("reward_shaping", "advantage_shaping", "filters", "corrections")
EXAMPLES = settings(max_examples=20, suppress_health_check=list(HealthCheck), derandomize=True)


def variant(field: str) -> st.SearchStrategy[dict[str, Any]]:
    """One of a field's variants, as it is or with a parameter changed."""
    each = [[one, *(changed for _, changed in options.changes_of(one, field))] for one in options.variants(field)]
    return st.sampled_from(each).flatmap(st.sampled_from)


def term(*estimators: str) -> st.SearchStrategy[dict[str, Any] | None]:
    """A KL, or none."""
    some = st.fixed_dictionaries(
        {"coefficient": st.sampled_from([0.05, 0.5]), "estimator": st.sampled_from(estimators)}
    )
    return st.none() | some


SECTIONS = st.fixed_dictionaries(
    {
        "policy_loss": variant("policy_loss"),
        "advantage": variant("advantage"),
        "aggregation": variant("aggregation"),
    },
    optional={
        "kl": st.fixed_dictionaries(
            {
                "loss": term("k2", "k3", "unbiased"),
                "reward": term("k1", "k2", "k3"),
                "rollout": term("k2", "k3", "unbiased", "drift"),
            }
        ),
        "value": st.fixed_dictionaries(
            {"backbone": st.just("shared"), "loss": variant("value.loss"), "aggregation": variant("value.aggregation")}
        ),
        "entropy_coefficient": st.sampled_from([0.01, -0.1]),
        "distillation": st.fixed_dictionaries({"direction": st.sampled_from(["reverse", "forward"])}),
        "proximal": st.sampled_from(["recompute", "approximate", "ewma"]),
        "reward_placement": st.just("every_token"),
        **{field: st.lists(variant(field), max_size=2) for field in LISTS},
    },
)


def accepted(section: dict[str, Any]) -> Objective:
    """Sections that are refused are none of ours; what is refused has tests of its own."""
    try:
        made = Objective.from_config(AlgorithmConfig.model_validate(section), updates_per_step=2)
        made.check_rewards()
        return made
    except ConfigError:
        assume(False)
        raise


@EXAMPLES
@given(section=SECTIONS)
def test_an_accepted_section_is_the_same_from_yaml_and_from_its_passport(section):
    made = accepted(section)
    written = yaml.safe_dump(made.config.model_dump(mode="json"))
    assert AlgorithmConfig.model_validate(yaml.safe_load(written)) == made.config
    passport = json.loads(json.dumps(made.formula()))
    again = Objective.from_config(AlgorithmConfig.model_validate(from_passport(passport)), updates_per_step=2)
    assert json.loads(json.dumps(again.formula())) == passport


def from_passport(passport: dict[str, Any]) -> dict[str, Any]:
    """The algorithm section that a passport describes."""

    def named(part: dict[str, Any]) -> dict[str, Any]:
        return {"name": part["name"], **part["parameters"]}

    section: dict[str, Any] = {
        field: [named(part) for part in passport[field]] if field in LISTS else named(passport[field])
        for field in HOMES
        if isinstance(passport.get(field), dict | list)
    }
    section["kl"] = {
        name: term and {key: value for key, value in term.items() if key in ("coefficient", "estimator")}
        for name, term in passport["kl"].items()
    }
    if passport["value"] is not None:
        parts = {part: named(passport["value"][part]) for part in ("loss", "aggregation")}
        section["value"] = {"backbone": "shared", **parts}
    if (distillation := passport["distillation"]) is not None:
        section["distillation"] = {key: value for key, value in distillation.items() if key != "formula"}
    return section | {
        "entropy_coefficient": passport["entropy"]["coefficient"],
        "proximal": passport["proximal"]["name"],
        **({"proximal_decay": passport["proximal"]["decay"]} if "decay" in passport["proximal"] else {}),
        "reward_placement": passport["reward_placement"],
    }


@EXAMPLES
@given(section=SECTIONS, seed=st.integers(0, 1000), shuffle=st.randoms(use_true_random=False))
def test_an_accepted_section_has_one_loss_and_gradient_in_every_layout(section, seed, shuffle):
    made, whole = accepted(section), mixed(seed, positive=True)
    loss, _, gradient = whole.loss(made)
    order = list(range(len(whole.policy)))
    shuffle.shuffle(order)
    cuts = sorted(shuffle.sample(range(1, len(order)), 2))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    of_parts, _, gradient_of_parts = whole.loss(made, parts)
    torch.testing.assert_close(of_parts, loss, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient_of_parts, gradient, rtol=1e-9, atol=1e-12)
    wide, _, gradient_of_wide = whole.rows(order).padded(left=0, right=2, garbage=math.nan).loss(made)
    back = torch.empty_like(gradient)
    back[order] = gradient_of_wide[:, : gradient.shape[1]]
    # Equal rewards keep their order in a sum; others do not, and rewards are float32 here.
    torch.testing.assert_close(wide, loss, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(back, gradient, rtol=1e-4, atol=1e-6)


@EXAMPLES
@given(section=SECTIONS, seed=st.integers(0, 1000))
def test_an_accepted_section_trains_a_softmax_policy_in_float32_without_nan(section, seed):
    made = accepted(section)
    whole = in_float32(mixed(seed, positive=True))
    num_rows, width = whole.policy.shape
    tokens = torch.arange(num_rows * width).reshape(num_rows, width, 1) % VOCABULARY
    logits = torch.zeros(num_rows, width, VOCABULARY).requires_grad_()
    values = torch.zeros(num_rows, width).requires_grad_()
    optimizer = torch.optim.SGD([logits, values], lr=0.1)
    prepared = made.prepare(whole.batch)
    for _ in range(2):
        optimizer.zero_grad()
        logprobs = logits.log_softmax(-1)
        result = made.loss(
            prepared,
            policy_logprobs_BT=logprobs.gather(-1, tokens)[..., 0],
            entropies_BT=-(logprobs.exp() * logprobs).sum(-1),
            values_BT=values,
            policy_partition_BTP=torch.cat([logprobs[..., :2], logprobs[..., 2:].logsumexp(-1, keepdim=True)], -1),
        )
        if result.loss.requires_grad:
            result.loss.backward()
        optimizer.step()
        assert math.isfinite(float(result.loss.detach()))
    assert bool(torch.isfinite(logits).all()) and bool(torch.isfinite(values).all())
    assert all(math.isfinite(value) for value in result.statistics.compute().values())


def in_float32(whole: Case) -> Case:
    changed = {
        name: tensor.float()
        for name, tensor in ((name, getattr(whole.batch, name)) for name in whole.batch.__dataclass_fields__)
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
    }
    return Case(dataclasses.replace(whole.batch, **changed), whole.policy, whole.entropies, whole.values)
