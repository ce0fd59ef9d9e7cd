"""The probe that attests a run's weights: the run's own prompts, which the model finds likely.

Rounding grows with a token's nats: unlikely text would hide a difference between two versions that likely text shows.
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
"""Largest number of prompts that are read, without dropped ones. Prompts that are too short for the probe are repeated."""


def probe_token_ids(config: RunConfig) -> list[int]:
    """bos if the model has one, then the first prompts as the model sees them: `weights.canary_tokens` tokens, or as many as the context
    holds.

    Depends only on the configuration: the same after a resume and in a replay. Raises DataError if no prompt can be encoded.
    """
    formatter = load_formatter(config.model)
    source = open_prompts(config.prompts, field="prompts", source_column=config.reward.source_column)
    # The engine samples one token after the probe, which has to fit as well.
    num_tokens = min(config.weights.canary_tokens, formatter.max_context - 1)
    limit = PromptLimit(config.prompts, formatter, field="prompts")
    prompts = _encoded(source, formatter, limit, num_tokens=num_tokens)
    return one_text(prompts, bos=formatter.bos_token_id, num_tokens=num_tokens)


def one_text(prompts: Sequence[Sequence[int]], *, bos: int | None, num_tokens: int) -> list[int]:
    """`num_tokens` tokens: bos once, then the prompts in order, repeated as needed."""
    bare = [list(ids[1:] if ids[0] == bos else ids) for ids in prompts]
    text = [token for ids in bare for token in ids]
    front = [] if bos is None else [bos]
    return [*front, *itertools.islice(itertools.cycle(text or front), num_tokens - len(front))]


def _encoded(
    source: PromptSource, formatter: "ChatFormatter", limit: PromptLimit, *, num_tokens: int
) -> list[list[int]]:
    """Token ids of the first prompts, until they have `num_tokens` together. Refused prompts are skipped: their groups fail later."""
    encoded: list[list[int]] = []
    refused: list[DataError] = []
    for index in range(len(source)):
        if len(encoded) + len(refused) == _MAX_PROMPTS or sum(map(len, encoded)) > num_tokens:
            break
        try:
            if prompt := limit(source[index]):
                encoded.append(formatter.encode_unasked(prompt).token_ids)
        except DataError as error:
            refused.append(error)
    if not encoded:
        raise refused[0] if refused else DataError("every prompt is longer than prompts.max_prompt_tokens; raise it")
    return encoded
