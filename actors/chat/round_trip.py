"""Proves that a parser reads calls as the chat template writes them: awkward values, optional arguments, several calls."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.chat.calls import ReplyParser, TemplateParser, ToolCall
from actors.chat.derivation import derived
from actors.chat.rendered_calls import render_turn
from actors.chat.rendering import ChatTemplate, Tool
from cluster.contracts.errors import DataError


def _tool(name: str, /, **properties: str) -> Tool:
    described = {key: {"type": kind, "description": f"The {key}."} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": described, "required": [*properties][:1]}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


PROBE_TOOLS: tuple[Tool, ...] = (
    _tool("zqfind", text="string", count="integer"),
    _tool("zqset", name="string", share="number", on="boolean", rows="array", options="object", maybe="null"),
    _tool("zqname", zqkeya="string", zqkeyb="string"),
    _tool("zqother", zqkeyc="string", zqkeyd="string"),
)
"""Tools with names that no user has, to find them in renderings."""


def _call(tool: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(name=tool, arguments=arguments)


_FIND = _call("zqfind", text="a cat", count=41)
_AWKWARD = _call("zqfind", text='say "no", {x: [1]} <d> é 1 < 2\n  and\t\\n', count=-3)
_TYPES = _call("zqset", name="12", share=0.5, on=True, rows=[1, "a", None], options={"a": {"b": [False]}}, maybe=None)
_CASES: dict[str, list[ToolCall]] = {
    "a call": [_FIND],
    "a call without its optional argument": [_call("zqfind", text="alone")],
    "quotes, brackets and tags in a value": [_AWKWARD],
    "numbers, booleans, null and nested values": [_TYPES],
}
_WORDS = "No {call} here, 1 < 2."
_TWO = [_FIND, _call("zqset", name="b", on=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenParser:
    parser: ReplyParser
    is_own: bool
    """True: the tokenizer has the response template. False: it was derived from the chat template."""
    takes_several: bool
    """Whether the chat template writes several calls in a turn."""


def find_parser(
    template: ChatTemplate, *, own: dict[str, Any] | None, stops: Sequence[str], generation_prompt: str
) -> ProvenParser:
    """The parser by the tokenizer's `own` response template if it passes the proof, else by one that is derived from the chat template.

    Raises DataError with the reasons if neither passes.
    """
    reasons: list[str] = []
    if own is not None:
        try:
            return _proven(own, template, is_own=True, stops=stops)
        except DataError as error:
            reasons.append(f"the tokenizer's response template: {error}")
    try:
        made = derived(template, tools=PROBE_TOOLS, stops=stops, generation_prompt=generation_prompt)
        return _proven(made, template, is_own=False, stops=stops)
    except DataError as error:
        raise DataError("; ".join([*reasons, str(error)])) from error


def _proven(
    response_template: dict[str, Any], template: ChatTemplate, *, is_own: bool, stops: Sequence[str]
) -> ProvenParser:
    parser = TemplateParser(response_template)
    return ProvenParser(parser=parser, is_own=is_own, takes_several=prove(parser, template, stops=stops))


def prove(parser: ReplyParser, template: ChatTemplate, *, stops: Sequence[str]) -> bool:
    """Whether the template writes several calls in a turn. Raises DataError naming the first case that the parser misreads."""
    options = {"tools": PROBE_TOOLS, "stops": stops}
    for case, calls in _CASES.items():
        _prove_one(parser, template, calls, case=case, **options)
    _prove_one(parser, template, [], case="words without a call", content=_WORDS, **options)
    if _keeps_words(template, **options):
        _prove_one(parser, template, [_FIND], case="words before a call", content=_WORDS, **options)
    try:
        render_turn(template, _TWO, **options)
    except DataError:
        return False
    _prove_one(parser, template, _TWO, case="two calls", **options)
    return True


def _keeps_words(template: ChatTemplate, **options: Any) -> bool:
    try:
        return _WORDS in render_turn(template, [_FIND], content=_WORDS, **options).text
    except DataError:
        return False


def _prove_one(
    parser: ReplyParser,
    template: ChatTemplate,
    calls: Sequence[ToolCall],
    *,
    case: str,
    content: str = "",
    **options: Any,
) -> None:
    turn = render_turn(template, calls, content=content, **options)
    reply = parser(turn.text + turn.stop, prompt=turn.prompt, tools=PROBE_TOOLS)
    if (read := _as_json(reply.calls), reply.text.strip()) != (_as_json(calls), content):
        raise DataError(
            f"{case} is read as something else: {turn.text[:120]!r} as {read[:120]} and {reply.text[:60]!r}"
        )


def _as_json(calls: Sequence[ToolCall]) -> str:
    """Compared as JSON: in Python True equals 1."""
    return json.dumps([[call.name, call.arguments] for call in calls], sort_keys=True)
