"""The parsers that vLLM's own server uses, by their names there."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from transformers import AutoTokenizer

from cluster.contracts.errors import ConfigError


def vllm(*, text: str, tools: Sequence[Any], parser: str, tokenizer: str) -> tuple[str, list[dict[str, Any]]]:
    """`parser` is a name of vLLM's `--tool-call-parser` (hermes, mistral, pythonic, ...); `tokenizer` the folder or hub name of the model,
    whose control tokens it looks for."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest.model_validate({"messages": [], "model": "policy", "tools": [*tools]})
    found = _parser(parser, tokenizer).extract_tool_calls(text, request)
    calls = [
        {"name": each.function.name, "arguments": json.loads(each.function.arguments)} for each in found.tool_calls
    ]
    return found.content or "", calls


@cache
def _parser(name: str, tokenizer: str) -> Any:
    from vllm.tool_parsers import ToolParserManager

    try:
        parser = ToolParserManager.get_tool_parser(name)
    except KeyError as error:
        known = ", ".join(sorted({*ToolParserManager.lazy_parsers, *ToolParserManager.tool_parsers}))
        raise ConfigError(f"episodes.parser.parser={name!r} is none of vLLM's: {known}") from error
    return parser(AutoTokenizer.from_pretrained(tokenizer))
