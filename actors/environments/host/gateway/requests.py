"""Reads a request for a completion of a chat or of a raw prompt, and refuses unsupported settings.

Sampling is the run's. A token sampled at another temperature has the log-prob of another distribution.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from actors.environments.host.gateway.refusals import RefusedError
from actors.writable import writable
from cluster.contracts.episodes import Message, RawPrompt

_DEFAULTS: dict[str, Any] = {
    "temperature": 1,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "seed": None,
    "response_format": {"type": "text"},
}
"""OpenAI's defaults: the values that a request may name if the run's own value is not known."""
_CHAT_FIXED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
}
"""Fields of a chat request that are accepted with these values only."""
_RAW_FIXED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "add_special_tokens": (True,),
    "skip_special_tokens": (False,),
    "include_stop_str_in_output": (False,),
}
"""The same for a raw prompt. The last three are vLLM's."""
_READ = ("model", "max_tokens", "stop", "stream", "stream_options")
_CHAT_READ = ("messages", "tools", "max_completion_tokens", *_READ)
_RAW_READ = ("prompt", "return_token_ids", *_READ)
_WITHOUT_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
"""Fields that do not change an answer."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""OpenAI's role to the role in chat templates."""
_JSON_NAMES = {dict: "object", list: "array", str: "string", bool: "boolean"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    model: str
    """Any name is accepted: there is one model."""
    max_tokens: int | None
    stop: tuple[str, ...]
    is_streamed: bool
    wants_usage: bool
    """The stream ends with the usage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(_Request):
    messages: tuple[Message, ...]
    """In the format of chat templates."""
    tools: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRequest(_Request):
    prompt: RawPrompt
    wants_token_ids: bool


def read_chat_request(body: bytes, *, sampling: Mapping[str, Any]) -> ChatRequest:
    """`sampling` has the run's values, as far as they are known. Raises RefusedError, naming the field."""
    fields = _fields(body, read=_CHAT_READ, fixed=_CHAT_FIXED, sampling=sampling)
    return ChatRequest(
        **_shared(fields),
        messages=_messages(fields.get("messages")),
        tools=tuple(_schema(each) for each in _typed(fields, "tools", list, [])),
    )


def read_raw_request(body: bytes, *, sampling: Mapping[str, Any]) -> RawRequest:
    """As `read_chat_request`."""
    fields = _fields(body, read=_RAW_READ, fixed=_RAW_FIXED, sampling=sampling)
    return RawRequest(
        **_shared(fields),
        prompt=_prompt(fields.get("prompt")),
        wants_token_ids=_typed(fields, "return_token_ids", bool, False),
    )


def _fields(
    body: bytes, *, read: Collection[str], fixed: Mapping[str, tuple[Any, ...]], sampling: Mapping[str, Any]
) -> dict[str, Any]:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise RefusedError("the body must be a JSON object")
    # Clients write null for fields that their user did not set.
    fields = {name: value for name, value in given.items() if value is not None}
    for name, value in fields.items():
        if name not in read and name not in _WITHOUT_EFFECT:
            _check_setting(name, value, fixed=fixed, sampling=sampling)
    return fields


def _shared(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `_Request`."""
    options = _typed(fields, "stream_options", dict, {})
    return {
        "model": _typed(fields, "model", str, "policy"),
        "max_tokens": _max_tokens(fields),
        "stop": _stop(fields.get("stop", ())),
        "is_streamed": _typed(fields, "stream", bool, False),
        "wants_usage": options.get("include_usage") is True,
    }


def arguments_of(text: Any) -> dict[str, Any] | str:
    """The arguments of a call: an object, or the text that the model wrote in its place."""
    if not isinstance(text, str):
        return text if isinstance(text, dict) else json.dumps(text)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _check_setting(name: str, value: Any, *, fixed: Mapping[str, tuple[Any, ...]], sampling: Mapping[str, Any]) -> None:
    if name in _DEFAULTS:
        runs = sampling.get(name, _DEFAULTS[name])
        if value != runs:
            raise RefusedError(
                f"{name}={value!r} differs from the run's {runs!r}: log-probs would be of another distribution than the trained one; "
                "leave it out",
                code="unsupported_value",
                param=name,
            )
    elif name not in fixed:
        raise RefusedError(f"{name} is not supported; leave it out", code="unsupported_parameter", param=name)
    elif value not in fixed[name]:
        raise RefusedError(
            f"{name}={value!r} is not supported, only {fixed[name][0]!r}; leave it out",
            code="unsupported_value",
            param=name,
        )


def _typed(fields: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = fields.get(name, default)
    if not isinstance(value, kind):
        raise RefusedError(f"{name} must be a JSON {_JSON_NAMES[kind]}, not {value!r:.200}", param=name)
    return value


def _max_tokens(fields: Mapping[str, Any]) -> int | None:
    said = {name: fields[name] for name in ("max_tokens", "max_completion_tokens") if name in fields}
    for name, value in said.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RefusedError(f"{name}={value!r:.200} must be a whole number above 0", param=name)
    if len({*said.values()}) > 1:
        raise RefusedError("max_tokens and max_completion_tokens differ; leave one of them out", param="max_tokens")
    return next(iter(said.values()), None)


def _prompt(given: Any) -> RawPrompt:
    """A list with one prompt counts as that prompt."""
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    # JSON can hold unpaired surrogates, which no tokenizer takes.
    if isinstance(given, str) and writable(given) == given:
        return given
    # Not isinstance: a bool is an int.
    if isinstance(given, list) and all(type(each) is int for each in given):
        return tuple(given)
    raise RefusedError(
        f"prompt={given!r:.200} must be a text or a list of token ids; send one request for each prompt",
        param="prompt",
    )


def _stop(given: Any) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not all(isinstance(each, str) and each for each in texts):
        raise RefusedError(f"stop={given!r:.200} must be a text or a list of texts, none of them empty", param="stop")
    return tuple(texts)


def _schema(given: Any) -> Mapping[str, Any]:
    function = given.get("function") if isinstance(given, dict) and given.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedError(f"a tool must be a function with a name, not {given!r:.200}", param="tools")
    return {"type": "function", "function": function}


def _messages(given: Any) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        raise RefusedError("messages must be a list of at least one message", param="messages")
    # Names of called tools by call id: a tool's message has only the id.
    names: dict[str, str] = {}
    return tuple(_message(each, names, param=f"messages[{place}]") for place, each in enumerate(given))


def _message(given: Any, names: dict[str, str], *, param: str) -> Message:
    role = given.get("role") if isinstance(given, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise RefusedError(f"{param} has role {role!r:.200}; there are: {', '.join(_ROLES)}", param=param)
    for name in ("function_call", "audio"):
        if given.get(name) is not None:
            raise RefusedError(f"{param}.{name} is not supported", param=f"{param}.{name}")
    message: dict[str, Any] = {"role": _ROLES[role], "content": _text(given.get("content"), param=f"{param}.content")}
    _keep_text(message, given, "name")
    if role == "assistant":
        _keep_text(message, given, "reasoning_content")
        called = given.get("tool_calls") or []
        if not isinstance(called, list):
            where = f"{param}.tool_calls"
            raise RefusedError(f"{where} must be a JSON array, not {called!r:.200}", param=where)
        if calls := [_call(each, param=param) for each in called]:
            message["tool_calls"] = calls
            names.update({call["id"]: call["function"]["name"] for call in calls if "id" in call})
    if role == "tool":
        _keep_text(message, given, "tool_call_id")
        if name := names.get(message.get("tool_call_id", "")):
            message["name"] = name
    return message


def _keep_text(message: dict[str, Any], given: Mapping[str, Any], name: str) -> None:
    if isinstance(given.get(name), str):
        message[name] = given[name]


def _text(content: Any, *, param: str) -> str:
    """Parts of text are joined as vLLM joins them."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RefusedError(f"{param} has a part of type {kind!r}; only text is supported", param=param)
    return "\n".join(part["text"] for part in parts)


def _call(given: Any, *, param: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedError(f"{param} has a tool call that is not a function with a name", param=f"{param}.tool_calls")
    called = {"name": function["name"], "arguments": arguments_of(function.get("arguments") or "{}")}
    made = {"type": "function", "function": called}
    return {"id": given["id"], **made} if isinstance(given.get("id"), str) else made
