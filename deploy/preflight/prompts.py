"""Checks of the prompts: they open, they have the columns that settings name, and they leave room for a completion."""

import math
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors.rollout.sampling import own_sampling
from cluster.contracts.config import PromptsConfig, RunConfig
from cluster.contracts.errors import ConfigError, DataError
from cluster.contracts.protocols import PromptSource
from cluster.contracts.types import Prompt

if TYPE_CHECKING:
    from actors.chat.formatter import ChatFormatter, EncodedPrompt

_SCAN_S = 0.5
"""Time limit of the scan of lengths, for which every start waits: thousands of prompts of a file, a thousand of a generated source. Later
prompts are checked when they are sampled."""
_NUM_FIRST = 100
"""Prompts whose columns are checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """Result of the scan of lengths."""

    num_scanned: int
    num_dropped: int
    """Scanned prompts that are longer than `max_prompt_tokens` and are not sampled."""
    num_truncated: int
    longest: int
    """Tokens of the longest scanned text, before it is truncated."""
    first_text: str
    """The first prompt, as the model sees it."""
    first_tokens: tuple[str, ...]
    """Its tokens as text, special tokens included."""
    is_templated: bool


def check_columns(
    source: PromptSource, columns: Mapping[str, str], config: RunConfig, *, field: str, numbers: Collection[str] = ()
) -> None:
    """Raises ConfigError for a column of `columns` (by the setting that names it) that none of the first prompts has. Raises it too for a
    first prompt with an invalid sampling column, or without a number in one of `numbers`, which the objective reads."""
    looked_at = firsts(source) if columns or numbers or config.sampling.columns else []
    for setting, column in columns.items():
        if all(prompt.columns.get(column) is None for prompt in looked_at):
            known = ", ".join(dict.fromkeys(name for prompt in looked_at for name in prompt.columns)) or "none"
            raise ConfigError(
                f"{setting}={column!r}: none of the first {len(looked_at)} prompts of {field} has this column; they have: {known}"
            )
    shaping = config.algorithm.advantage_shaping
    weights = {variant.params.get("column") for variant in shaping if variant.name == "column_weights"}
    for prompt in looked_at:
        try:
            own_sampling(prompt, config.sampling)
        except DataError as error:
            raise ConfigError(f"{field}: {error}") from error
        for column in numbers:
            value = prompt.columns.get(column)
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigError(
                    f"{field}: column {column!r} of prompt {prompt.prompt_id!r} is {value!r}; the algorithm reads a number there: give "
                    "every prompt one"
                )
            if column in weights and value < 0:
                raise ConfigError(
                    f"{field}: column {column!r} of prompt {prompt.prompt_id!r} is {value!r}; algorithm.advantage_shaping='column_weights' "
                    "takes weights of 0 or more"
                )


def check_recipes(source: PromptSource, config: RunConfig, *, field: str) -> None:
    """Raises ConfigError for a first prompt whose source has no reward parts."""
    from actors.reward_service.recipe import names_for

    for prompt in firsts(source) if config.reward.by_source else ():
        try:
            names_for(config.reward, prompt.columns)
        except DataError as error:
            raise ConfigError(f"{field}: prompt {prompt.prompt_id!r}: {error}; give it one") from error


def unseen_sources(source: PromptSource, config: RunConfig) -> str | None:
    """A note if a source of `reference.by_source` has none of the first prompts."""
    looked_at, reference = firsts(source), config.reference
    seen = {str(prompt.columns.get(reference.source_column)) for prompt in looked_at}
    unseen = [repr(name) for name in reference.by_source if name not in seen]
    return (
        f"reference.by_source: none of the first {len(looked_at)} prompts has the source {' or '.join(unseen)}"
        if unseen
        else None
    )


def trained_on(source: PromptSource, held_out: PromptSource, *, num_evaluated: int) -> str | None:
    """A note if most of the first evaluated prompts are among the first that the run trains on. None if all training prompts are equal:
    then the seed of a group makes its task."""
    trained, looked_at = {_content(prompt) for prompt in firsts(source)}, firsts(held_out)[:num_evaluated]
    num_both = sum(_content(prompt) in trained for prompt in looked_at)
    if len(trained) == 1 or 2 * num_both <= len(looked_at):
        return None
    return (
        f"{num_both} of the first {len(looked_at)} held-out prompts are among the first that the run trains on; give evaluation.prompts "
        "another split, file or seed"
    )


def answered(source: PromptSource) -> str | None:
    """A note if prompts contain the answer already, as data sets for supervised training do."""
    looked_at = firsts(source)
    num_answered = sum(bool(each.messages) and each.messages[-1].get("role") == "assistant" for each in looked_at)
    if num_answered == 0:
        return None
    return (
        f"{num_answered} of the first {len(looked_at)} end with a message of the assistant, and the model begins another message after it; "
        "move the answer from the messages to a column of its own"
    )


def check_demonstrations(config: RunConfig) -> None:
    """Raises ConfigError if the demonstrations of the first update cannot be learned from."""
    from deploy.cluster_up.factories import demonstrations

    try:
        if found := demonstrations(config):
            found.of_update(0)
    except DataError as error:
        raise ConfigError(f"algorithm.sft: {error}") from error


def check_lengths(
    source: PromptSource,
    formatter: "ChatFormatter",
    config: RunConfig,
    prompts: PromptsConfig,
    *,
    field: str,
    most: int,
) -> Looks:
    """Scans prompts until `most` of them can be sampled or the time is up. Raises ConfigError for a prompt that leaves no room for a
    completion, or that `on_long_prompt` makes an error."""
    from actors.chat.limit import PromptLimit

    deadline = time.monotonic() + _SCAN_S
    room = formatter.max_context - config.sampling.max_tokens
    limit = PromptLimit(prompts, formatter, field=field)
    if limit.max_tokens is not None and limit.max_tokens > room:
        why = _room(config, formatter, room)
        raise ConfigError(f"{field}.max_prompt_tokens={limit.max_tokens} is beyond {why}; lower one of them")
    first, longest, most_bytes, counts = None, source[0], -1, Counter[str]()
    for prompt in map(source.__getitem__, range(len(source))):
        if (size := _num_bytes(prompt)) > most_bytes:
            longest, most_bytes = prompt, size
        try:
            # A token covers at least a byte, so a short text fits with any tokenizer. The first prompt is always encoded.
            is_short = limit.max_tokens is None and first is not None and size < room // 2
            fitted = limit(prompt)
            num_tokens = 0 if is_short or fitted is None else len(_encoded(fitted, formatter, config).token_ids)
        except DataError as error:
            raise ConfigError(f"{field}: {error}") from error
        if num_tokens > room:
            raise ConfigError(
                f"{field}: prompt {prompt.prompt_id!r} has {num_tokens} tokens, more than {_room(config, formatter, room)}; shorten it, "
                f"set {field}.max_prompt_tokens and {field}.on_long_prompt, lower sampling.max_tokens, or raise model.max_context"
            )
        first = first or fitted
        counts["scanned"] += 1
        counts["dropped"] += fitted is None
        counts["truncated"] += fitted is not None and fitted is not prompt
        if counts["scanned"] - counts["dropped"] == most or time.monotonic() > deadline:
            break
    if first is None:
        raise ConfigError(
            f"{field}.max_prompt_tokens={prompts.max_prompt_tokens}: each of the first {counts['scanned']:,} prompts is longer; raise it"
        )
    encoded = _encoded(first, formatter, config)
    return Looks(
        num_scanned=counts["scanned"],
        num_dropped=counts["dropped"],
        num_truncated=counts["truncated"],
        longest=formatter.num_tokens(longest),
        first_text=encoded.text,
        first_tokens=formatter.shown(encoded.token_ids),
        is_templated=formatter.has_template and first.messages is not None,
    )


def firsts(source: PromptSource) -> list[Prompt]:
    """The prompts whose columns are checked."""
    return [source[index] for index in range(min(len(source), _NUM_FIRST))]


def _encoded(prompt: Prompt, formatter: "ChatFormatter", config: RunConfig) -> "EncodedPrompt":
    try:
        return formatter.encode(prompt)
    except DataError:
        if not config.is_played(config.environment_of(prompt.columns)):
            raise
        return formatter.encode_unasked(prompt)


def _room(config: RunConfig, formatter: "ChatFormatter", room: int) -> str:
    return f"the {room} that sampling.max_tokens={config.sampling.max_tokens} leaves in the context of {formatter.max_context}"


def _content(prompt: Prompt) -> tuple[str | None, str]:
    return prompt.text, str(prompt.messages)


def _num_bytes(prompt: Prompt) -> int:
    texts = [prompt.text or "", *(str(message.get("content", "")) for message in prompt.messages or [])]
    return sum(len(text.encode()) for text in texts)
