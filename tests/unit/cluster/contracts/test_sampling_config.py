"""Sampling settings that contradict each other, or that cannot act, are refused with the way out."""

import pytest
from pydantic import ValidationError

from cluster.contracts.config import EvaluationConfig, RunConfig, SamplingConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 is above max_tokens=8; lower it"),
        ({"top_k": 1}, "top_k=1 leaves one token, of log-prob 0: there is nothing to learn"),
        ({"regex": "a+", "choice": ["a"]}, "regex and choice are set, and the engine takes only one of them"),
        ({"ignore_eos": True, "regex": "a+"}, "ignore_eos=true with regex: a complete text must end"),
        ({"ignore_eos": True, "columns": {"grammar": "g"}}, "ignore_eos=true with columns.grammar: a complete text"),
        ({"ignore_eos": True, "min_tokens": 4}, "min_tokens=4 with ignore_eos=true and without `stop`"),
        ({"temperature": 0.001}, "temperature"),  # vLLM would sample at 0.01
        ({"temperature": 2.5}, "temperature"),
        ({"min_p": 1.0}, "min_p"),
        ({"stop": [""]}, "stop"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"logit_bias": {5: 101.0}}, "logit_bias"),
        ({"columns": {"temperature": "t"}}, "columns"),
    ],
)
def test_what_cannot_act_or_be_sampled_is_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        SamplingConfig.model_validate(settings)


def test_a_stop_string_may_end_what_an_end_of_sequence_token_does_not():
    sampling = SamplingConfig(ignore_eos=True, min_tokens=4, stop=(".",))
    assert sampling.biased() == ["min_tokens"]


def test_what_the_learner_computes_too_is_not_biased():
    assert SamplingConfig(temperature=0.5, top_k=9, top_p=0.9, min_p=0.1, stop=("x",), ignore_eos=True).biased() == []


def test_what_the_learner_leaves_out_is_named():
    sampling = SamplingConfig(repetition_penalty=1.1, json_schema={}, columns={"max_tokens": "limit", "regex": "form"})
    assert sampling.biased() == ["repetition_penalty", "json_schema", "columns.regex"]


@pytest.mark.parametrize("sampling", [{"frequency_penalty": 0.5}, {"bad_words": ["x"]}, {"columns": {"regex": "form"}}])
def test_what_counts_a_completions_own_tokens_cannot_be_resumed(sampling):
    def configured(on_update: str) -> RunConfig:
        run = {"model": {"path": "none"}, "prompts": "none", "sampling": sampling, "rollout": {"on_update": on_update}}
        return RunConfig.model_validate(run)

    with pytest.raises(ValidationError, match="abort_and_resume: the engine would apply it only to the"):
        configured("abort_and_resume")
    assert configured("finish").rollout.on_update == "finish"


def test_held_out_samples_that_are_all_the_same_are_refused():
    with pytest.raises(
        ValidationError, match="num_samples=4 with temperature=0: the samples of a prompt are all the same"
    ):
        EvaluationConfig(num_samples=4)
    assert EvaluationConfig(num_samples=4, temperature=0.6).num_samples == 4
