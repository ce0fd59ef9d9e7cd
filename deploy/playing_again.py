"""`treadwheel play --episode`: gives an environment the model's recorded turns again and compares its answers with the record."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.text import Text

from cluster.contracts.episodes import Asked, Event, Message, RawPrompt, Rewritten, Said, ToolCall
from cluster.contracts.errors import ConfigError
from cluster.contracts.types import FinishReason, Prompt, sample_seed
from cluster.record.ledger import Ledger
from cluster.record.recorder import Recorder
from cluster.record.run_directory import RunDirectory
from cluster.sinks.console.words import for_terminal
from deploy.playing import Game
from deploy.reports.run_info import config_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A recorded turn of the model."""

    said: Said
    before: Sequence[Message]
    """Messages before it in its segment, the prompt first."""
    written: Sequence[Message]
    """The messages among them that are new in this turn."""

    @property
    def line(self) -> str:
        """As a person would type it."""
        calls = [
            f"/{call.name} {call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)}"
            for call in self.said.tool_calls
        ]
        return "\n".join(filter(None, [self.said.text, *calls]))


def of_record(run_dir: str, episode: str) -> tuple[Game, list[Turn], bool]:
    """(game, the model's turns, whether the environment ended the episode: no limit did, and nothing failed).

    `episode` is group and sample, such as `34/2`, as the viewer names them. Raises ConfigError for an episode that is not recorded, and
    for a single turn.
    """
    directory = RunDirectory(run_dir)
    config = config_of(directory)
    rows = _rows(directory, episode)
    first = rows[0]
    if first["messages"] is None:
        raise ConfigError(f"--episode={episode!r} is a single turn, which no environment played; name an episode")
    columns = json.loads(first["info"])
    messages = columns.pop("messages", None)
    text = None if messages else first["prompt_text"]
    prompt = Prompt(prompt_id=first["prompt_id"], messages=messages, text=text, columns=columns)
    name = first["environment"]
    if name not in config.named_environments:
        raise ConfigError(f"--episode={episode!r} was played by {name!r}, which the run file does not name any more")
    seed = sample_seed(config.seed, first["ticket_index"])
    game = Game.of_environment(config, name, prompt, seed=seed, index=first["sample_index"])
    was_ended = first["failed_stage"] is None and rows[-1]["finish_reason"] == FinishReason.STOP
    return game, [turn for row in rows for turn in _turns(row)], was_ended


def _rows(directory: RunDirectory, episode: str) -> list[dict[str, Any]]:
    if (asked := re.fullmatch(r"(\d+)/(\d+)", episode)) is None:
        raise ConfigError(f"--episode={episode!r} is not of the form GROUP/SAMPLE, such as 34/2")
    ticket, sample = int(asked[1]), int(asked[2])
    record = next((each for each in Ledger(directory).records() if ticket in each.groups), None)
    if record is None:
        raise ConfigError(
            f"--episode={episode!r}: {directory.url!r} recorded no group {ticket}; the viewer lists the groups of each step"
        )
    names = ["ticket_index", "sample_index", "prompt_id", "prompt_text", "info", "environment", "episode", "messages",
             "segment_index", "finish_reason", "failed_stage", "turns", "prompt_token_ids", "completion_token_ids"]  # fmt: skip
    groups = Recorder(directory).read(record.trajectories, record.trajectories_digest)
    rows = [row for group in groups for row in group.select(names).to_pylist()]
    of_group = [row for row in rows if row["ticket_index"] == ticket]
    found = [row for row in of_group if row["sample_index"] == sample]
    if not found:
        last = max(row["sample_index"] for row in of_group)
        raise ConfigError(f"--episode={episode!r}: group {ticket} has samples 0 to {last}")
    return found


def _turns(row: dict[str, Any]) -> Iterator[Turn]:
    messages, told = json.loads(row["messages"]), json.loads(row["episode"])
    replies, endings = told.get("replies"), told.get("endings")
    if replies is None:  # a record that does not name the model's messages
        places = [place for place, each in enumerate(messages) if each["role"] == "assistant"]
    else:  # empty for an episode that ended before its first turn
        places = replies[row["segment_index"]] if replies else []
    turns = row["turns"] or ()
    for index, (last, place) in enumerate(pairwise([-1, *places])):
        said = _said(messages[place])
        if len(turns) == len(places):
            start, end = turns[index]["start"], turns[index]["end"]
            prompt, completion = row["prompt_token_ids"], row["completion_token_ids"]
            said = replace(
                said,
                finish_reason=FinishReason(turns[index]["finish_reason"]),
                num_tokens=end - start,
                num_context_tokens=len(prompt) + end,
                token_ids=tuple(completion[start:end]),
                prompt_token_ids=(*prompt, *completion[:start]),
            )
        if endings:  # a record of an earlier version has none
            said = replace(said, ending=endings[row["segment_index"]][index])
        yield Turn(said=said, before=messages[:place], written=messages[last + 1 : place])


def _said(message: dict[str, Any]) -> Said:
    calls = tuple(
        ToolCall(name=each["function"]["name"], arguments=each["function"]["arguments"], id=each.get("id"))
        for each in message.get("tool_calls") or ()
    )
    return Said(text=message.get("content") or "", tool_calls=calls, reasoning=message.get("reasoning_content"))


class Again:
    """Repeats the model's recorded turns."""

    def __init__(self, turns: Sequence[Turn], screen: Console) -> None:
        self._turns = turns
        self._screen = screen
        self._num_said = 0
        self.num_differences = 0
        """Turns before which the environment's messages differ from the record."""

        self.asks_for_more = False
        """The environment has asked for a turn after the last recorded one."""

    def lines(self) -> Iterator[str]:
        yield from (turn.line for turn in self._turns)
        self.asks_for_more = True

    @property
    def num_unasked(self) -> int:
        """Turns of the run that the environment has not asked for."""
        return len(self._turns) - self._num_said

    def take(self, events: Sequence[Event]) -> None:
        pass

    def say(self, asked: Asked, line: str) -> Said:
        turn = self._turns[self._num_said]
        self._num_said += 1
        if asked.raw is None:
            contexts = [event.messages for event in asked.events if isinstance(event, Rewritten)]
            new = [dict(each) for each in (*(contexts[-1] if contexts else ()), *asked.messages)]
            then = [dict(each) for each in turn.before[0 if contexts else len(turn.before) - len(new) :]]
            is_same = then == new
        else:
            then, is_same = turn.written[-1:], _is_prompt_of(turn, asked.raw)
        if not is_same:
            self.num_differences += 1
            recorded = " | ".join(str(each.get("content")) for each in then) or "nothing"
            said = for_terminal(f"  in the run it said: {recorded}")
            self._screen.print(Text(said, style="bold red"), soft_wrap=True)
        return turn.said if asked.wants_token_ids else replace(turn.said, token_ids=None, prompt_token_ids=None)


def _is_prompt_of(turn: Turn, raw: RawPrompt) -> bool:
    """Whether the turn's recorded prompt was `raw`. Of a text that continues a context only the new part is compared."""
    if not isinstance(raw, str):
        return turn.said.prompt_token_ids in (None, tuple(raw))
    text = "".join(str(each.get("content")) for each in turn.written)
    return raw.endswith(text) if turn.written != turn.before else raw == text
