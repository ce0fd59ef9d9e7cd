"""The parsers that vLLM's own server uses, by their names there."""

import json
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from transformers import AutoTokenizer

from cluster.contracts.errors import ConfigError

_STARTS = ("tool_call_start_token", "tool_calls_start_token", "tool_start_token", "bot_token", "bot_string", "tc_start")
"""Attributes in which parsers keep the text that begins their calls."""


def vllm(*, text: str, tools: Sequence[Any], parser: str, tokenizer: str) -> tuple[str, list[dict[str, Any]]]:
    """`parser` is a name of vLLM's `--tool-call-parser` (hermes, mistral, pythonic, ...); `tokenizer` the folder or hub name of the model,
    whose control tokens it looks for.

    Raises ValueError where a call begins and none is read: the parsers log what is malformed, and return all of it as words.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest.model_validate({"messages": [], "model": "policy", "tools": [*tools]})
    reader = _parser(parser, tokenizer, json.dumps(tools))
    try:
        found = reader.extract_tool_calls(text, request)
    except NotImplementedError as error:  # gpt-oss: vLLM's server reads its tokens
        raise ConfigError(
            f"episodes.parser.parser={parser!r} reads no text in vLLM; name a function of yours in episodes.parser, or use no tools"
        ) from error
    if not found.tool_calls and (start := next((start for start in _starts(reader) if start in text), None)):
        raise ValueError(f"{start} begins a call that {parser} cannot read")
    calls = [
        {"name": each.function.name, "arguments": json.loads(each.function.arguments)} for each in found.tool_calls
    ]
    return found.content or "", calls


def _starts(reader: Any) -> list[str]:
    """Without one that is a word: Phi's calls begin with `functools`, and so do other sentences."""
    found = [getattr(reader, name, None) for name in _STARTS]
    return [start for start in found if isinstance(start, str) and start and not start[0].isalnum()]


@lru_cache(maxsize=32)
def _parser(name: str, tokenizer: str, tools: str) -> Any:
    """With the tools, since the text of some formats says no types."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    from vllm.tool_parsers import ToolParserManager

    try:
        parser = ToolParserManager.get_tool_parser(name)
    except KeyError as error:
        known = ", ".join(sorted({*ToolParserManager.lazy_parsers, *ToolParserManager.tool_parsers}))
        raise ConfigError(f"episodes.parser.parser={name!r} is none of vLLM's: {known}") from error
    return parser(
        _tokenizer(tokenizer), tools=[ChatCompletionToolsParam.model_validate(each) for each in json.loads(tools)]
    )


@cache
def _tokenizer(name: str) -> Any:
    return AutoTokenizer.from_pretrained(name)
