"""The probe is bos and the run's own first prompts, and nothing but the configuration decides it."""

import json
from pathlib import Path

import pytest

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import DataError
from deploy.cluster_up.probe import one_text, probe_token_ids
from tests.models import make_tiny_model, make_tokenizer

BOS = 0


def config_with(folder: Path, prompts: list[str], *, canary_tokens: int = 64, **model) -> RunConfig:
    make_tiny_model(folder / "model", **model)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return RunConfig.model_validate(
        {
            "model": {"path": str(folder / "model")},
            "prompts": {"name": "file", "path": str(folder / "prompts.jsonl")},
            "weights": {"canary_tokens": canary_tokens},
        }
    )


def characters(text: str) -> list[int]:
    return make_tokenizer()(text).input_ids


@pytest.mark.parametrize("adds_bos", [True, False])
def test_bos_stands_in_front_once_whether_or_not_the_tokenizer_adds_it(tmp_path, adds_bos):
    config = config_with(tmp_path, ["1+1=", "12+30="], canary_tokens=11, adds_bos=adds_bos)
    assert probe_token_ids(config) == [BOS, *characters("1+1=12+30=")]


def test_prompts_go_through_the_chat_template(tmp_path):
    template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    config = config_with(tmp_path, ["1+1=", "2+2="], canary_tokens=13, chat_template=template)
    assert probe_token_ids(config) == [BOS, *characters("<1+1=><2+2=>")]


def test_short_prompts_are_read_again_and_a_long_one_is_enough(tmp_path):
    assert one_text([[5, 6], [7]], bos=1, num_tokens=8) == [1, 5, 6, 7, 5, 6, 7, 5]
    assert one_text([[1, 5, 6], [1, 7]], bos=1, num_tokens=4) == [1, 5, 6, 7]
    assert one_text([list(range(100))], bos=None, num_tokens=3) == [0, 1, 2]
    assert one_text([[1], [1]], bos=1, num_tokens=3) == [1, 1, 1]


def test_a_tiny_context_shortens_the_probe_and_a_prompt_beyond_it_is_left_out(tmp_path):
    config = config_with(tmp_path, ["9" * 40, "1+1="], max_context=9)
    assert probe_token_ids(config) == [BOS, *characters("1+1=1+1")]


@pytest.mark.parametrize(("rule", "text"), [("drop", "1+1=1+1"), ("truncate_end", "9999999")])
def test_long_prompts_are_in_the_probe_as_they_are_sampled(tmp_path, rule, text):
    config = config_with(tmp_path, ["9" * 40] * 100 + ["1+1="], max_context=9)
    limit = {"max_prompt_tokens": 4, "on_long_prompt": rule}
    prompts = config.prompts.model_copy(update=limit)
    assert probe_token_ids(config.model_copy(update={"prompts": prompts})) == [BOS, *characters(text)]


def test_a_source_whose_prompts_all_fail_says_why(tmp_path):
    with pytest.raises(DataError, match="40 tokens"):
        probe_token_ids(config_with(tmp_path, ["9" * 40], max_context=9))


def test_equal_configurations_have_equal_probes_and_the_seed_is_no_part_of_it(tmp_path):
    config = config_with(tmp_path, [f"{number}+1=" for number in range(100)])
    assert probe_token_ids(config) == probe_token_ids(config.model_copy(update={"seed": 7}))
    assert len(probe_token_ids(config)) == 64
