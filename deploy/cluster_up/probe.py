"""The probe that attests a run's weights: text that the model finds likely, since the run is about to ask it just that.

Rounding is relative to a token's nats: unlikely text blurs the difference between two versions that likely text shows.
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from actors.chat.limit import PromptLimit
from cluster.contracts.config import RunConfig
from cluster.contracts.errors import DataError
from cluster.contracts.protocols import PromptSource
from cluster.rollouts.mixture import open_prompts
from deploy.formatters import load_formatter

if TYPE_CHECKING:
    from actors.chat.formatter import ChatFormatter

_MAX_PROMPTS = 64
"""Prompts that are looked at, dropped ones aside; those are read again where they are too short for the probe."""


def probe_token_ids(config: RunConfig) -> list[int]:
    """bos where the model has one, then the first prompts as the model sees them: `weights.canary_tokens`, or what the context holds.

    A function of the configuration alone: the same after a resume, and in a replay. Raises DataError when no prompt can be encoded.
    """
    formatter = load_formatter(config.model)
    source = open_prompts(config.prompts, field="prompts", source_column=config.reward.source_column)
    # The engine samples one token after the probe, which has to fit as well.
    num_tokens = min(config.weights.canary_tokens, formatter.max_context - 1)
    limit = PromptLimit(config.prompts, formatter, field="prompts")
    prompts = _encoded(source, formatter, limit, num_tokens=num_tokens)
    return one_text(prompts, bos=formatter.bos_token_id, num_tokens=num_tokens)


def one_text(prompts: Sequence[Sequence[int]], *, bos: int | None, num_tokens: int) -> list[int]:
    """bos once, then `num_tokens` in all of the prompts one after the other, and from the first one again at their end."""
    bare = [list(ids[1:] if ids[0] == bos else ids) for ids in prompts]
    text = [token for ids in bare for token in ids]
    front = [] if bos is None else [bos]
    return [*front, *itertools.islice(itertools.cycle(text or front), num_tokens - len(front))]


def _encoded(
    source: PromptSource, formatter: "ChatFormatter", limit: PromptLimit, *, num_tokens: int
) -> list[list[int]]:
    """The first prompts that are sampled, until they are `num_tokens` long; one that is refused is its group's problem, later."""
    encoded: list[list[int]] = []
    refused: list[DataError] = []
    for index in range(len(source)):
        if len(encoded) + len(refused) == _MAX_PROMPTS or sum(map(len, encoded)) > num_tokens:
            break
        try:
            if prompt := limit(source[index]):
                encoded.append(formatter.encode(prompt).token_ids)
        except DataError as error:
            refused.append(error)
    if not encoded:
        raise refused[0] if refused else DataError("every prompt is longer than prompts.max_prompt_tokens; raise it")
    return encoded
