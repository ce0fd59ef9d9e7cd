"""Decoder layers compiled by torch (`learner.compile`); embeddings, the vocabulary head and the losses stay as they are.

Layers of one kind share their code, and so its compilations: one for all of them, and one more where gradients are wanted or not, where
a window slides, where adapters are switched off. Sizes of passes are dynamic from the first one on. Packed attention in buckets is left
out: how many a pass has, and which of them have masks, is Python's to decide, and each answer would be a compilation of its own.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cluster.contracts.errors import ConfigError, headline
from learner.distributed import decoder_layers
from learner.model.attention import PACKED, attend_in_buckets, packed_attention

_MOST_COMPILATIONS = 64
"""Of one piece of code. Beyond it torch computes uncompiled, also in the middle of a pass: a layer that is then computed again for its
activations keeps others than before, and its rank fails while the other ranks wait. Torch's own limit, 8, is reached by ranks that share
passes: gradients or none, one position or several, with a mask or without."""


def compile_layers(module: nn.Module) -> None:
    """In place, for every transformers model in it, sharded or not: gathering stays outside of what is compiled.

    Each compilation happens in the first pass that needs it, which raises ConfigError where it fails.
    """
    from torch._dynamo.exc import TorchDynamoException
    from torch._functorch import config as backward

    # Else backward is compiled inside of backward, where nobody tells its errors apart.
    backward.force_non_lazy_backward_lowering = True
    otherwise: Any = torch.compiler.disable(attend_in_buckets)
    ALL_ATTENTION_FUNCTIONS.register(PACKED, functools.partial(packed_attention, otherwise=otherwise))
    for layer in decoder_layers(module):
        layer.forward = _compiled(layer.forward, error_kind=TorchDynamoException)


def _compiled(forward: Callable[..., Any], *, error_kind: type[Exception]) -> Callable[..., Any]:
    # The limit is missing from torch's overloads.
    compiled = torch.compile(forward, dynamic=True, recompile_limit=_MOST_COMPILATIONS)  # pyright: ignore[reportCallIssue]

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except error_kind as error:
            raise ConfigError(
                f"learner.compile=true: torch does not compile this model: {headline(error)}; leave it out"
            ) from error

    return run
