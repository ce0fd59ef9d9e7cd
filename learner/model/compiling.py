"""Decoder layers compiled by torch (`learner.compile`). Embeddings, the vocabulary head and the losses are not compiled.

Layers of one class share their code and its compilations: one for all of them, and further ones with or without gradients, with a sliding
window, with adapters switched off. Sizes are dynamic from the first pass on. Packed attention in buckets is not compiled: the number of
buckets, and which of them have masks, differs from pass to pass, and each combination would be another compilation.
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
"""Compilations of one function. Beyond this limit torch computes uncompiled, also in the middle of a pass: recomputing the activations of a
checkpointed layer then saves other tensors than before, and its rank fails while the other ranks wait. Ranks that share passes reach
torch's own limit of 8: with or without gradients, one position or several, with or without a mask."""


def compile_layers(module: nn.Module) -> None:
    """Compiles the layers of every transformers model in `module`, in place. Gathering of shards stays outside of the compiled code.

    Each compilation happens in the first pass that needs it. That pass raises ConfigError if it fails.
    """
    from torch._dynamo.exc import TorchDynamoException
    from torch._functorch import config as backward

    # Otherwise backward is compiled during backward, where its errors are not turned into ConfigError.
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
