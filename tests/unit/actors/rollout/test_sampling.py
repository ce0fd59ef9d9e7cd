"""A prompt's own sampling, and what vLLM is asked for."""

import pytest

from actors.rollout.sampling import own_sampling, structure, vllm_arguments, works_on_text
from cluster.contracts.errors import DataError
from cluster.contracts.protocols import EngineRequest
from cluster.contracts.sampling_config import SamplingConfig
from cluster.contracts.types import Completion, FinishReason, Prompt, sample_seed

RUN = SamplingConfig(
    max_tokens=10, regex="[0-9]+", columns={"max_tokens": "limit", "choice": "options", "regex": "form"}
)


def own(**columns) -> SamplingConfig:
    return own_sampling(Prompt(prompt_id="p", text="", columns=columns), RUN)


def test_a_prompt_without_values_of_its_own_has_the_runs():
    assert own(limit=None, other=3) == SamplingConfig(max_tokens=10, regex="[0-9]+")


def test_a_prompts_structure_stands_in_place_of_the_runs():
    assert own(options=["yes", "no"], limit=3) == SamplingConfig(max_tokens=3).model_copy(
        update={"choice": ["yes", "no"]}
    )
    assert structure(own(options=["yes", "no"])) == {"choice": ["yes", "no"]}


@pytest.mark.parametrize("options", ["yes|no", []])
def test_a_choice_that_is_no_list_of_texts_reaches_vllm_which_refuses_it(options):
    assert structure(own(options=options)) == {"choice": options}


@pytest.mark.parametrize("limit", [0, 11, "3", 2.5, True])
def test_a_limit_that_is_none_or_above_the_runs_is_refused(limit):
    with pytest.raises(
        DataError, match=f"prompt 'p': column 'limit' is {limit!r}; its max_tokens must be a whole number"
    ):
        own(limit=limit)


def test_a_limit_below_the_runs_least_number_of_tokens_is_refused():
    sampling = SamplingConfig(max_tokens=10, min_tokens=4, columns={"max_tokens": "limit"})
    with pytest.raises(DataError, match=r"'limit' is 3; .* from sampling.min_tokens=4 to sampling.max_tokens=10"):
        own_sampling(Prompt(prompt_id="p", text="", columns={"limit": 3}), sampling)
    assert own_sampling(Prompt(prompt_id="p", text="", columns={"limit": 4}), sampling).max_tokens == 4


def test_two_structures_of_one_prompt_are_refused():
    with pytest.raises(DataError, match="prompt 'p' has regex and choice, and the engine takes one of them"):
        own(options=["a"], form="a")


def arguments(sampling: SamplingConfig, *, num_kept: int = 0):
    kept = Completion(
        token_ids=[5] * num_kept,
        rollout_logprobs=[0.0] * num_kept,
        policy_versions=[0] * num_kept,
        finish_reason=FinishReason.ABORTED,
    )
    request = EngineRequest(
        request_id="r", prompt_token_ids=[1], sampling=sampling, seed=7, kept=kept if num_kept else None
    )
    return vllm_arguments(request, stop_token_ids=[2])


def test_a_resumed_request_has_what_is_left_of_its_limits_and_other_random_numbers():
    found = arguments(SamplingConfig(max_tokens=10, min_tokens=6), num_kept=4)
    assert (found["max_tokens"], found["min_tokens"], found["seed"]) == (6, 2, sample_seed(7, 4))
    assert arguments(SamplingConfig(max_tokens=10, min_tokens=6), num_kept=8)["min_tokens"] == 0


def test_without_ends_of_sequence_no_token_stops():
    assert arguments(SamplingConfig(max_tokens=10))["stop_token_ids"] == [2]
    assert arguments(SamplingConfig(max_tokens=10, ignore_eos=True))["stop_token_ids"] == []


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingConfig(max_tokens=1, logit_bias={3: 1.0}, columns={"max_tokens": "limit"}), False),
        (SamplingConfig(max_tokens=1, stop=(".",)), True),
        (SamplingConfig(max_tokens=1, bad_words=("x",)), True),
        (SamplingConfig(max_tokens=1, json_schema={}), True),
        (SamplingConfig(max_tokens=1, columns={"regex": "form"}), True),
    ],
)
def test_the_engine_needs_a_tokenizer_for_texts_alone(sampling, expected):
    assert works_on_text(sampling) is expected
