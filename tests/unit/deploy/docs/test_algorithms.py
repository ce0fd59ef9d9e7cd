"""What the page of the mathematics needs of every docstring."""

import re
import typing

import pytest

from cluster.contracts.algorithm_config import AlgorithmConfig, KlConfig
from cluster.contracts.plugins import Plugin, find, names
from cluster.contracts.settings import section_in
from deploy.docs.algorithms import page
from learner.algorithms.objective import Objective
from learner.algorithms.registry.homes import HOMES
from learner.algorithms.registry.variants import docstring_sections
from tests.unit.learner.algorithms import options


@pytest.mark.parametrize("field", HOMES)
def test_every_variant_states_formula_source_degenerate_case_and_peers(field):
    for name in names(HOMES[field]):
        function = find(Plugin(name=name), home=HOMES[field], field=field)
        missing = {"Formula", "Source", "Degenerate", "Peers"} - docstring_sections(function).keys()
        assert not missing, f"{field}: {name} lacks {missing}"


PAGE = page()
SECTIONS = {
    key: set(re.findall(r"^### `(\w+)`", section, re.M))
    for section in PAGE.split("\n## ")
    for line in section.splitlines()
    if line.startswith("Set by `algorithm.")
    for key in re.findall(r"`algorithm\.([\w.]+)`", line)
}
"""Names on the page by the key that sets them."""


def test_each_kind_of_variant_is_on_the_page_under_its_key():
    assert {field: set(names(home)) for field, home in HOMES.items()} == SECTIONS


@pytest.mark.parametrize("field", HOMES)
def test_every_name_on_the_page_can_be_set_by_its_key(field):
    for variant in options.variants(field):
        needs_critic = (
            {"advantage": "gae", "value": {}} if field.startswith("value.") or variant["name"] == "gae" else {}
        )
        section = options.with_set(needs_critic | options.BESIDE.get(variant["name"], {}), field, variant)
        Objective.from_config(AlgorithmConfig.model_validate(section))


@pytest.mark.parametrize("term", KlConfig.model_fields)
def test_every_estimator_of_a_kl_that_can_be_set_is_on_the_page(term):
    section = section_in(KlConfig.model_fields[term])
    assert section is not None
    for estimator in typing.get_args(section.model_fields["estimator"].annotation):
        assert f"### `{estimator}`" in PAGE


def test_what_was_promised_is_reachable_save_for_losses_that_stay_one_per_token():
    promised = {
        "advantage": "grpo dr_grpo mean_centered rloo reinforce_pp reinforce_pp_baseline group_mean_batch_std max_rl gdpo gae "
        "cumulative_returns cpgd",
        "policy_loss": "ppo_clip reinforce gspo gspo_token cispo cpgd gmpo sapo dppo clip_cov kl_cov importance_sampling",
        "aggregation": "token_mean sequence_mean prompt_mean sequence_sum_over_length sum",
        "corrections": "tis icepop sequence_mask opsm decoupled",
        "filters": "zero_variance overlong_mask high_entropy_tokens",
        "reward_shaping": "overlong_penalty reward_clip",
        "advantage_shaping": "advantage_clip group_weights",
        "value.loss": "value_clip",
    }
    assert [name for field, listed in promised.items() for name in listed.split() if name not in SECTIONS[field]] == []
