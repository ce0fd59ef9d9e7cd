"""What `treadwheel list` says."""

import subprocess
import sys

import pytest

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.plugins import Plugin, names
from cluster.contracts.settings import fields
from deploy.listing import KINDS, described, listing, overview
from learner.algorithms.registry.presets import PRESETS


def test_a_variant_shows_parameters_with_types_and_defaults_and_what_it_means():
    lines = list(listing("losses"))
    start = lines.index("ppo_clip: Clipped surrogate of PPO and GRPO.")
    assert lines[start + 1] == "    epsilon_low: number = 0.2"
    assert lines[start + 3] == "    dual_clip: number | none = none"
    assert {"    pattern: text (required)", "    tags: list of text = ('think', 'answer')"} <= {*listing("rewards")}
    assert "    max_length: integer = sampling.max_tokens" in list(listing("reward_shaping"))


def test_the_parameters_of_a_prompt_source_are_explained():
    (file,) = (each for each in described(KINDS["prompts"]) if each.name == "file")
    assert "`system_prompt` is put before the messages" in file.meaning and "`text_as` decides" in file.meaning
    assert "Raises" not in file.meaning


@pytest.mark.parametrize("word", KINDS)
def test_every_variant_of_every_kind_says_what_it_means(word):
    variants = described(KINDS[word])
    assert [each.name for each in variants] == names(KINDS[word].home) != []
    for each in variants:
        assert each.meaning and "does not import" not in each.meaning, each.name


def test_presets_are_a_kind_too():
    assert next(line for line in listing("presets") if line.startswith("lite_ppo: ")) == (
        "lite_ppo: {advantage: group_mean_batch_std, policy_loss: {name: ppo_clip}, aggregation: token_mean}"
    )
    assert len(list(listing("presets"))) == len(PRESETS)


def test_every_setting_that_names_a_variant_is_of_a_kind():
    known = {word for kind in KINDS.values() for word in kind.setting.replace(",", "").split()}
    plugins = [
        name for name, field in fields(RunConfig) if "Plugin" in str(field.annotation) or field.annotation is Plugin
    ]
    assert len(plugins) == 18
    assert [name for name in (*plugins, "prompts", "evaluation.prompts") if name not in known] == []


def test_a_kind_that_does_not_exist_names_those_that_do():
    with pytest.raises(ConfigError, match=r"'reward' is not a kind of variant; did you mean 'rewards'[?].* losses"):
        list(listing("reward"))


def test_the_overview_names_every_variant_and_imports_none():
    assert "losses (algorithm.policy_loss): cispo, clip_cov, " in "\n".join(overview())
    command = "import sys\nfrom deploy.cli import app\ntry: app(['list'])\nfinally: print({'torch', 'ray'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False).stdout
    assert "exact_match, format" in shown and shown.endswith("set()\n")
