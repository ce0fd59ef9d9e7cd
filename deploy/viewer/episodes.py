"""Episodes for the pages: their numbers, and their conversations as blocks. A block is a turn, or the tokens written between two turns."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

from actors.writable import writable

_MOST_LABELS = 6
"""Messages between two turns that a label names."""
_MOST_CHARACTERS = 80
"""Characters of a name."""

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFacts:
    """Numbers of one episode."""

    environment: str
    num_turns: int
    num_calls: int
    """The model's tool calls, including malformed ones."""
    num_malformed_calls: int
    failed_stage: str | None
    """None: nothing failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a tool that the model wrote."""

    name: str
    arguments: str
    """A JSON object, or the model's text if it is none."""
    is_malformed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Tokens of one writer: places `start` to `end - 1` of the episode's completion."""

    start: int
    end: int
    turn: int | None = None
    """From 1, over the whole episode. None: not sampled, but written by environment, tool or template."""
    label: str
    """`user`, `tool add` or several of them; "" if no message is known for these tokens."""
    role: str
    """Role of its first message; "" if no message is known for these tokens."""
    finish_reason: str | None = None
    """None if it was written."""
    earned: float | None = None
    """Sum of a turn's token rewards; None if none were recorded or it was written."""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """The history was replaced before the token at `start`: by the environment, or by the template (`episodes.history: template`)."""

    start: int
    num_tokens: int
    """Tokens of the new context."""
    prompt: str
    """Text of the new context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    blocks: tuple[Block, ...]
    rewrites: tuple[Rewrite, ...]


def facts_of(row: Mapping[str, Any]) -> EpisodeFacts | None:
    """From the columns of a whole trajectory; None for a single turn."""
    if row["episode"] is None:
        return None
    recorded = json.loads(row["episode"])
    return EpisodeFacts(
        environment=row["environment"],
        num_turns=len(row["turns"] or ()),
        num_calls=recorded.get("num_calls", 0),
        num_malformed_calls=recorded.get("num_malformed_calls", 0),
        failed_stage=row["failed_stage"],
    )


def last_words(row: Mapping[str, Any]) -> str | None:
    """The model's last message in an episode, with its tool calls, from the columns of a whole trajectory. None for a single turn, or if
    the last message is not the assistant's."""
    messages = _messages(row["messages"])
    if row["episode"] is None or not _last_replies(messages, 1):
        return None
    calls = [f"{call.name}({call.arguments})" for call in map(_call, _calls(messages[-1]))]
    return "\n".join([*filter(None, [writable(str(messages[-1].get("content") or ""))]), *calls])


def conversation(segments: Sequence[Mapping[str, Any]]) -> Conversation | None:
    """`segments` are the rows of one trajectory, in order. None if no turns are recorded: the completion is one turn."""
    if all(segment["turns"] is None for segment in segments):
        return None
    blocks: list[Block] = []
    rewrites: list[Rewrite] = []
    start = num_turns = 0
    for segment in segments:
        if segment["segment_index"]:
            num_tokens = len(segment["prompt_token_ids"])
            rewrites.append(Rewrite(start=start, num_tokens=num_tokens, prompt=segment["prompt_text"]))
        blocks += _blocks(segment, start=start, num_turns=num_turns)
        start += len(segment["completion_token_ids"])
        num_turns += len(segment["turns"] or ())
    return Conversation(blocks=tuple(blocks), rewrites=tuple(rewrites))


def _blocks(segment: Mapping[str, Any], *, start: int, num_turns: int) -> Iterator[Block]:
    """Blocks of one segment, which begins at token `start` and after `num_turns` turns."""
    turns: list[dict[str, Any]] = segment["turns"] or []
    messages = _messages(segment["messages"])
    replies = _recorded_replies(segment, messages) or _last_replies(messages, len(turns))
    names = {call.get("id"): _function(call).get("name") for each in messages for call in _calls(each)}
    end = 0
    for index, turn in enumerate(turns):
        if turn["start"] > end:
            between = messages[replies[index - 1] + 1 : replies[index]] if replies and index else []
            yield _written(start + end, start + turn["start"], between, names)
        end = turn["end"]
        rewards = segment["token_rewards"]
        yield Block(
            start=start + turn["start"],
            end=start + end,
            turn=num_turns + index + 1,
            label="assistant",
            role="assistant",
            finish_reason=turn["finish_reason"],
            earned=None if rewards is None else math.fsum(rewards[turn["start"] : end]),
            calls=tuple(map(_call, _calls(messages[replies[index]]))) if replies else (),
        )
    if len(segment["completion_token_ids"]) > end:
        yield _written(start + end, start + len(segment["completion_token_ids"]), [], names)


def _written(start: int, end: int, messages: Sequence[Message], names: Mapping[Any, Any]) -> Block:
    labels = [_label(each, names) for each in messages]
    counted = [(label, len(list(same))) for label, same in groupby(labels)]
    shown = [f"{label} ×{count}" if count > 1 else label for label, count in counted[:_MOST_LABELS]]
    more = [f"{len(counted) - _MOST_LABELS} more"] if len(counted) > _MOST_LABELS else []
    role = str(messages[0]["role"]) if messages else ""
    return Block(start=start, end=end, label=", ".join([*shown, *more]), role=role)


def _recorded_replies(segment: Mapping[str, Any], messages: Sequence[Message]) -> list[int]:
    """Indices of the messages that are turns; [] if they were not recorded or do not fit."""
    of_segments = json.loads(segment.get("episode") or "{}").get("replies") or []
    places: list[int] = of_segments[segment["segment_index"]] if segment["segment_index"] < len(of_segments) else []
    fits = all(place < len(messages) and messages[place]["role"] == "assistant" for place in places)
    return places if fits and len(places) == len(segment["turns"] or ()) else []


def _last_replies(messages: Sequence[Message], num_turns: int) -> list[int]:
    """Indices of the last `num_turns` messages of the assistant; [] if there are fewer, or the last message is not the assistant's."""
    places = [place for place, each in enumerate(messages) if each["role"] == "assistant"]
    fits = len(places) >= num_turns > 0 and places[-1] == len(messages) - 1
    return places[-num_turns:] if fits else []


def _messages(column: str | None) -> list[Message]:
    """[] for content that is not a conversation: imported trajectories may contain anything."""
    try:
        parsed = json.loads(column or "[]")
    except (ValueError, RecursionError):
        return []
    if not isinstance(parsed, list):
        return []
    messages = cast("list[Any]", parsed)
    is_one = all(isinstance(each, dict) and isinstance(cast("Message", each).get("role"), str) for each in messages)
    return messages if is_one else []


def _calls(message: Message) -> list[Message]:
    calls = message.get("tool_calls")
    return [call for call in cast("list[Any]", calls) if isinstance(call, dict)] if isinstance(calls, list) else []


def _function(call: Message) -> Message:
    function = call.get("function")
    return cast("Message", function) if isinstance(function, dict) else call


def _call(call: Message) -> Call:
    function = _function(call)
    arguments = function.get("arguments")
    is_text = isinstance(arguments, str)
    text = arguments if is_text else json.dumps(arguments, ensure_ascii=False)
    return Call(name=_name(function.get("name")), arguments=writable(text), is_malformed=is_text)


def _label(message: Message, names: Mapping[Any, Any]) -> str:
    """The role, and for a tool its name, or else the name in the call that it answers."""
    role = _name(message["role"])
    if role != "tool":
        return role
    asked = message.get("tool_call_id")
    name = message.get("name") or (names.get(asked) if isinstance(asked, str) else None)
    return f"{role} {_name(name)}" if name else role


def _name(value: Any) -> str:
    return writable(str(value))[:_MOST_CHARACTERS]
