"""The chat formatter of a model, for a driver: imports only the part of transformers that tokenizers need, and no model code."""

from typing import TYPE_CHECKING

from cluster.contracts.config import ModelConfig
from cluster.contracts.importing import importing, tokenizers_alone

if TYPE_CHECKING:
    from actors.chat.formatter import ChatFormatter


def load_formatter(model: ModelConfig) -> "ChatFormatter":
    """Raises ConfigError as `ChatFormatter.load`."""
    with importing():
        tokenizers_alone()
        from actors.chat.formatter import ChatFormatter

    return ChatFormatter.load(model)
