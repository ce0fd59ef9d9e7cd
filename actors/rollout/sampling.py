"""A prompt's sampling settings, and vLLM's parameters for them."""

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.contracts.errors import DataError
from cluster.contracts.protocols import EngineRequest
from cluster.contracts.sampling_config import PENALTIES, STRUCTURES, SamplingConfig
from cluster.contracts.types import Prompt, sample_seed

_AS_IT_IS = ("temperature", "top_p", "top_k", "min_p", "ignore_eos", *PENALTIES)
_FREE: dict[str, Any] = {"json_schema": None, "regex": None, "choice": (), "grammar": None}


def own_sampling(prompt: Prompt, sampling: SamplingConfig) -> SamplingConfig:
    """The run's sampling with the prompt's own values. A structure of the prompt replaces the run's, even one of another kind.

    Raises DataError naming column and value.
    """
    columns = sampling.columns
    own = {name: prompt.columns[column] for name, column in columns.items() if prompt.columns.get(column) is not None}
    if not own:
        return sampling.model_copy(update={"columns": {}})
    limit, least = own.get("max_tokens", sampling.max_tokens), sampling.min_tokens
    if type(limit) is not int or not max(least, 1) <= limit <= sampling.max_tokens:
        raise DataError(
            f"prompt {prompt.prompt_id!r}: column {columns['max_tokens']!r} is {limit!r}; its max_tokens must be a whole number from "
            f"{f'sampling.min_tokens={least}' if least else 1} to sampling.max_tokens={sampling.max_tokens}"
        )
    forced = [name for name in STRUCTURES if name in own]
    if len(forced) > 1:
        raise DataError(
            f"prompt {prompt.prompt_id!r} has {' and '.join(forced)}, and the engine takes one of them; leave the others empty"
        )
    return sampling.model_copy(update=(_FREE if forced else {}) | own | {"columns": {}})


def works_on_text(sampling: SamplingConfig) -> bool:
    """Whether the engine needs the tokenizer for this sampling."""
    is_forced = structure(sampling) is not None or any(name in sampling.columns for name in STRUCTURES)
    return is_forced or bool(sampling.stop or sampling.bad_words)


def structure(sampling: SamplingConfig) -> dict[str, Any] | None:
    """Arguments of vLLM's StructuredOutputsParams; None for free completions."""
    # A column's value stays as it is: vLLM must refuse a text in place of a list, which `list` would split into letters.
    choice = list(sampling.choice) or None if isinstance(sampling.choice, tuple) else sampling.choice
    wanted = {"json": sampling.json_schema, "regex": sampling.regex, "choice": choice, "grammar": sampling.grammar}
    return {kind: value for kind, value in wanted.items() if value is not None} or None


def vllm_arguments(request: EngineRequest, *, stop_token_ids: Sequence[int]) -> Mapping[str, Any]:
    """Arguments of vLLM's SamplingParams for the rest of a request, without its structure."""
    sampling, num_kept = request.sampling, len(request.kept.token_ids) if request.kept else 0
    return {
        **{name: getattr(sampling, name) for name in _AS_IT_IS},
        "max_tokens": sampling.max_tokens - num_kept,
        "min_tokens": max(sampling.min_tokens - num_kept, 0),
        "logit_bias": sampling.logit_bias or None,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": [] if sampling.ignore_eos else list(stop_token_ids),
        "bad_words": list(sampling.bad_words) or None,
        # A resumed request must not reuse the random numbers with which its kept tokens were drawn.
        "seed": sample_seed(request.seed, num_kept) if num_kept else request.seed,
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": bool(sampling.stop),
    }
