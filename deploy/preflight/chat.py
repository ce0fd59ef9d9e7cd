"""The rows about the chat template: which parts of a conversation with tools would be exact."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cluster.contracts.environment_config import EpisodesConfig
from cluster.contracts.errors import DataError

if TYPE_CHECKING:
    from actors.chat.formatter import ChatFormatter
    from actors.chat.report import ChatReport


def chat_rows(formatter: "ChatFormatter", episodes: EpisodesConfig) -> Iterator[tuple[str, str, str]]:
    """No rows for a model without a chat template. A template that is not exact is no problem for a run of single turns."""
    from actors.chat.report import chat_report

    if not formatter.has_template:
        return
    try:
        found = chat_report(formatter.turns())
    except DataError as error:
        yield "chat", "turns", f"not supported: {error}"
        return
    yield "chat", "turns", _turns(found)
    yield "chat", "history", _history(found, episodes)
    yield "chat", "tools", _tools(found, episodes)
    if found.unsplittable:
        yield (
            "chat",
            "note",
            f"no message may contain {' '.join(map(repr, found.unsplittable))}, which cannot be encoded as plain text",
        )
    if not found.cuts_cleanly:
        yield (
            "chat",
            "note",
            "the tokenizer puts a space before text that follows a turn, and the space cannot be removed exactly",
        )


def _turns(found: "ChatReport") -> str:
    if found.why_no_turns is not None:
        return f"not exact: {found.why_no_turns}"
    begin = f"begins with {found.generation_prompt!r}" if found.generation_prompt else "begins with nothing of its own"
    end = "no stop token" if found.stop_token is None else repr(found.turn_close)
    return f"exact; a reply {begin} and ends with {end}; {'system messages' if found.takes_system else 'no system messages'}"


def _history(found: "ChatReport", episodes: EpisodesConfig) -> str:
    if found.rewrites is None:
        return "stays as sampled"
    if episodes.history == "template":
        return f"a new segment begins where a user's message makes the template rewrite earlier turns: {found.rewrites}"
    return f"stays as sampled, although a user's message makes the template rewrite earlier turns: {found.rewrites}"


def _tools(found: "ChatReport", episodes: EpisodesConfig) -> str:
    if found.why_no_tools is not None:
        return f"not supported: {found.why_no_tools}"
    answers = "several answers in a row" if found.takes_several_answers else "one answer a turn"
    if episodes.parser is not None:
        return f"answers exact, {answers}; calls are read by episodes.parser={episodes.parser.name!r}"
    if found.why_no_calls is not None:
        return f"answers exact, {answers}; calls cannot be read: {found.why_no_calls}"
    calls = "several calls a turn" if found.takes_several_calls else "one call a turn"
    return f"answers exact, {answers}; {calls}, read by {found.calls_are_read_by}"
