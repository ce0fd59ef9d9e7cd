"""Derives a response template for transformers' parser from a chat template, which writes calls with known names and values.

Three formats of a call are known: one JSON value with name and arguments; arguments as JSON after a name; tags around name, keys and
values. The result is a guess that a round trip must prove (`round_trip.py`).
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from actors.chat.calls import ToolCall
from actors.chat.rendered_calls import num_common, num_common_at_end, render_turn
from actors.chat.rendering import ChatTemplate, Tool
from actors.reasoning import END_OF_THINK, THINK
from cluster.contracts.errors import DataError

_ONE = ToolCall(name="zqname", arguments={"zqkeya": "zqvala", "zqkeyb": "zqvalb"})
_OTHER = ToolCall(name="zqother", arguments={"zqkeyc": "zqvalc", "zqkeyd": "zqvald"})
_NAME = r"(?P<name>[\w.\-]+)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A call's place in a text: from its JSON, or its name, to its last value."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Around:
    """The template's text around each call, and around all calls together."""

    open: str
    close: str
    open_all: str
    close_all: str

    @property
    def opens(self) -> str:
        """Pattern of the opening with its white space. It tries each run of white space once: a model may write thousands of line ends, and
        a pattern that starts at each of them would take hours."""
        first = rf"(?:{_soft(self.open_all)}\s*)?" if self.open_all.strip() else ""
        each = rf"{_soft(self.open)}\s*" if self.open.strip() else ""
        return rf"(?:(?<!\s)\s+)?{first}{each}"

    @property
    def closes(self) -> str:
        return _soft(self.close) + _optional(self.close_all)


def derived(
    template: ChatTemplate,
    *,
    tools: Sequence[Tool],
    stops: Sequence[str],
    generation_prompt: str,
) -> dict[str, Any]:
    """`tools` may be any tools. Raises DataError for a format of calls that is none of the three."""
    options = {"tools": tools, "stops": stops}
    text = render_turn(template, [_ONE], **options).text
    try:
        both = render_turn(template, [_ONE, _OTHER], **options).text
    except DataError:  # one call a turn, then
        both = None
    if (whole := _json_with(text, _ONE.name, "zqvala")) is not None:
        field = _whole_call(text, both, whole, stops)
    elif _ONE.name not in text:
        raise _unknown("it does not write a call's name")
    elif _json_with(text, "zqkeya", "zqvala") is not None:
        field = _json_arguments(text, both, stops)
    else:
        field = _tags(text, both, stops)
    # The alternative never matches. Without it, `regex` looks from each white space to the text's end for a required part of the match.
    field["open_pattern"] = f"(?:{field['open_pattern']}|(*FAIL))"
    anchor = generation_prompt.partition(THINK)[0]
    fields: dict[str, Any] = {"tool_calls": field, "content": {"content": "text"}}
    if stops:
        fields["content"]["close_pattern"] = f"(?:{_any(stops)})\\s*"
    if THINK in template.source:
        fields["reasoning_content"] = {
            "open": THINK,
            "close_pattern": f"(?:{_any([END_OF_THINK, *stops])})\\s*",
            "content": "text",
        }
    begins = {"start_anchor": anchor} if anchor.strip() else {"start_anchor_pattern": r"\Z"}
    return {"defaults": {"role": "assistant"}, "fields": fields, **begins}


def _whole_call(text: str, both: str | None, place: _Place, stops: Sequence[str]) -> dict[str, Any]:
    value = json.loads(text[place.start : place.end])
    call = value[0] if isinstance(value, list) else value
    name, arguments = _path(call, _ONE.name), _path(call, _ONE.arguments)
    if name is None or arguments is None:
        raise _unknown("the JSON of a call has no name, or its arguments are not an object")
    if isinstance(value, list):
        around = _Around(open=text[: place.start], close=text[place.end :], open_all="", close_all="")
        function = {"name": f"{{{name}}}", "arguments": f"{{{arguments}}}"}
        rest: dict[str, Any] = {"transform_each": True, "transform": {"type": "function", "function": function}}
    else:
        other = None if both is None else _json_with(both, _OTHER.name, "zqvalc")
        around = _around(text, both, place, _json_with(both or "", _ONE.name, "zqvala"), other)
        function = {"name": f"{{content.{name}}}", "arguments": f"{{content.{arguments}}}"}
        rest = {"repeats": True, "transform": {"type": "function", "function": function}}
    # Without a tag, only the first key distinguishes a call from other JSON.
    first_key = "" if around.open.strip() else rf"\s*{re.escape(json.dumps(next(iter(call))))}"
    ahead = r"(?=\[)" if isinstance(value, list) else rf"(?=\{{{first_key})"
    return {"open_pattern": around.opens + ahead, "close_pattern": _closes(around, stops), "content": "json", **rest}


def _json_arguments(text: str, both: str | None, stops: Sequence[str]) -> dict[str, Any]:
    def place_of(call: ToolCall, where: str) -> _Place | None:
        key, value = next(iter(_arguments(call).items()))
        found = _json_with(where, key, value)
        start = -1 if found is None else where.rfind(call.name, 0, found.start)
        return None if found is None or start < 0 else _Place(start=start, end=found.end)

    place = place_of(_ONE, text)
    if place is None:
        raise _unknown("it writes the arguments of a call before its name")
    around = _around(text, both, place, place_of(_ONE, both or ""), place_of(_OTHER, both or ""))
    if not around.open.strip():
        raise _unknown("nothing begins a call")
    call = text[place.start + len(_ONE.name) : place.end]
    function = {"name": "{name}", "arguments": "{content}"}
    return {
        "open_pattern": f"{around.opens}{_NAME}\\s*{_soft(call[: call.index('{')])}\\s*(?=\\{{)",
        "close_pattern": _closes(around, stops),
        "content": "json",
        "repeats": True,
        "transform": {"type": "function", "function": function},
    }


def _tags(text: str, both: str | None, stops: Sequence[str]) -> dict[str, Any]:
    """Values stay text here; transformers converts them by the tool's schema."""

    def place_of(call: ToolCall, where: str) -> _Place | None:
        last = [*_arguments(call).values()][-1]
        known = call.name in where and last in where
        return _Place(start=where.index(call.name), end=where.index(last) + len(last)) if known else None

    pieces = re.split("zqname|zqkeya|zqvala|zqkeyb|zqvalb", text)
    place = place_of(_ONE, text)
    if len(pieces) != 6 or place is None or pieces[2] != pieces[4]:
        raise _unknown("it writes names, keys and values of a call neither as JSON nor in tags that are all alike")
    _, first, to_value, between, _, _ = pieces
    num_key = num_common_at_end(first, between)
    before_key, after_value = first[len(first) - num_key :], between[: len(between) - num_key]
    around = _around(text, both, place, place_of(_ONE, both or ""), place_of(_OTHER, both or ""))
    close = around.close.removeprefix(after_value)
    if not before_key.strip() or not after_value.strip() or not around.open.strip() or close == around.close:
        raise _unknown("nothing marks where a call, a key or a value ends")
    around = _Around(open=around.open, close=close, open_all=around.open_all, close_all=around.close_all)
    # If no further value ends, the search ends too. Otherwise it would search the rest again from each opening tag.
    value = f"(?:(?P<value>.*?){_tight(after_value)}|.*(*SKIP)(*FAIL))"
    tag = f"{_soft(before_key)}\\s*(?P<key>[^<>\\s]+?)\\s*{_tight(to_value)}{value}"
    return {
        "open_pattern": f"{around.opens}{_NAME}\\s*{_soft(first[: len(first) - num_key])}",
        "close_pattern": _closes(around, stops),
        "content": "xml-inline",
        "content_args": {"tag_pattern": tag},
        "repeats": True,
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }


def _around(text: str, both: str | None, place: _Place, one: _Place | None, other: _Place | None) -> _Around:
    before, after = text[: place.start], text[place.end :]
    if both is None or one is None or other is None:
        return _Around(open=before, close=after, open_all="", close_all="")
    middle = both[one.end : other.start]
    num_open = num_common_at_end(before, middle)
    num_close = num_common(after, middle[: len(middle) - num_open])
    return _Around(
        open=before[len(before) - num_open :],
        close=after[:num_close],
        open_all=before[: len(before) - num_open],
        close_all=after[num_close:],
    )


def _closes(around: _Around, stops: Sequence[str]) -> str:
    if around.close.strip():
        return f"{around.closes}\\s*"
    ends = [f"(?:{_any(stops)})\\s*"] if stops else [r"\Z"]
    return "|".join(ends + [f"(?={_soft(around.open)})"] * bool(around.open.strip()))


def _json_with(text: str, *held: str) -> _Place | None:
    """The first JSON object or list in `text` that contains all of `held`."""
    for found in re.finditer(r"[\[{]", text):
        with suppress(json.JSONDecodeError):
            value, end = json.JSONDecoder().raw_decode(text, found.start())
            if all(each in json.dumps(value) for each in held):
                return _Place(start=found.start(), end=end)
    return None


def _path(value: Any, wanted: Any) -> str | None:
    """Path of keys to `wanted` in nested objects, joined by dots."""
    for key, each in value.items() if isinstance(value, dict) else ():
        if each == wanted:
            return key
        if (rest := _path(each, wanted)) is not None:
            return f"{key}.{rest}"
    return None


def _soft(text: str) -> str:
    """A pattern of `text` with any white space between its words and none at its ends."""
    return r"\s*".join(map(re.escape, text.split()))


def _tight(text: str) -> str:
    """As `_soft`, but next to a value it matches only the template's own white space: more belongs to the value."""
    inner = text.strip()
    ahead, behind = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
    return f"(?:{re.escape(ahead)})?{_soft(inner)}(?:{re.escape(behind)})?"


def _optional(text: str) -> str:
    return f"(?:\\s*{_soft(text)}\\s*)?" if text.strip() else r"\s*"


def _any(stops: Sequence[str]) -> str:
    return "|".join(map(re.escape, stops))


def _unknown(why: str) -> DataError:
    return DataError(f"no parser can be made from the chat template: {why}")


def _arguments(call: ToolCall) -> dict[str, Any]:
    assert isinstance(call.arguments, dict), "a call of the probe is well formed"
    return call.arguments
