"""The tokens of one episode: the sampled ones, the written ones between them, and the rewards of each turn."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from actors.chat.formatter import EncodedPrompt
from actors.rollout.episodes.speech import Opening, Speech
from cluster.contracts.environment_config import EpisodesConfig
from cluster.contracts.episodes import Asked, Earned, Event, Logged, Message, RawPrompt, Rewritten, Said, Withdrawn
from cluster.contracts.errors import DataError, EpisodeOver, Limit, TooLongError
from cluster.contracts.types import Completion, FinishReason


@dataclass(slots=True, kw_only=True)
class Segment:
    """A stretch of turns whose prompts extend one another: one row. Per-token lists have one entry per token after the prompt."""

    prompt_text: str
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list[int])
    loss_mask: list[bool] = field(default_factory=list[bool])
    logprobs: list[float] = field(default_factory=list[float])
    policy_versions: list[int] = field(default_factory=list[int])
    token_rewards: list[float] = field(default_factory=list[float])
    turns: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """`finish_reason` of each turn, and its place: the tokens from `start` to before `end`."""
    experts: list[bytes | None] = field(default_factory=list[bytes | None])
    """For each turn `Completion.routed_experts` of the positions that earlier turns had not read; None for a turn without any."""
    messages: list[Message] = field(default_factory=list[Message])
    """The prompt's messages first."""
    num_messages: list[int] = field(default_factory=list[int])
    """Number of messages before each turn."""
    texts: list[str | None] = field(default_factory=list[str | None])
    """For each turn the text written before it and its own, special tokens included; None until it is needed."""
    endings: list[str] = field(default_factory=list[str])
    """`Said.ending` of each turn."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools that its prompt shows."""

    @property
    def context_ids(self) -> list[int]:
        """The prompt and all tokens after it."""
        return [*self.prompt_token_ids, *self.token_ids]

    def write(self, token_ids: Sequence[int], *, policy_version: int) -> None:
        """Adds tokens that were not sampled."""
        self._add(token_ids, [0.0] * len(token_ids), [policy_version] * len(token_ids), is_sampled=False)

    def sample(self, completion: Completion) -> None:
        start = len(self.token_ids)
        self.experts.append(self._not_yet_known(completion.routed_experts))
        self._add(completion.token_ids, completion.rollout_logprobs, completion.policy_versions, is_sampled=True)
        reason = str(completion.finish_reason)
        self.turns.append({"start": start, "end": len(self.token_ids), "finish_reason": reason})

    def drop_last_turn(self) -> None:
        """Drops also the tokens written before it."""
        self.turns.pop()
        self.experts.pop()
        end = self.turns[-1]["end"] if self.turns else 0
        for each in (self.token_ids, self.loss_mask, self.logprobs, self.policy_versions, self.token_rewards):
            del each[end:]
        del self.messages[self.num_messages.pop() :]
        self.texts.pop()
        self.endings.pop()

    @property
    def routed_experts(self) -> bytes | None:
        """Of all positions but the last; None if the last turn has none."""
        if not self.experts or self.experts[-1] is None:
            return None
        return b"".join(each for each in self.experts if each is not None)

    @property
    def replies(self) -> list[int]:
        """Indices of the turns among the messages, which may include other messages of the assistant."""
        return [end - 1 for end in (*self.num_messages[1:], len(self.messages))]

    def num_written(self) -> Counter[str]:
        """Number of tokens that were not sampled, by the role of the last message before their turn."""
        found: Counter[str] = Counter()
        ends_before = [0, *(turn["end"] for turn in self.turns[:-1])]
        for turn, end_before, reply in zip(self.turns, ends_before, self.replies, strict=True):
            if turn["start"] > end_before:
                found[self.messages[reply - 1]["role"]] += turn["start"] - end_before
        return found

    def _not_yet_known(self, experts: bytes | None) -> bytes | None:
        """The part of `experts` for new positions. A position keeps the experts of its first reading, as a token keeps its log-prob."""
        return None if experts is None else experts[sum(len(each) for each in self.experts if each) :]

    def _add(
        self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], *, is_sampled: bool
    ) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.policy_versions += versions
        self.loss_mask += [is_sampled] * len(token_ids)
        self.token_rewards += [0.0] * len(token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPrompt:
    """The context from which the model samples a turn."""

    token_ids: list[int]
    written_ids: list[int]
    """The end of `token_ids` that was not sampled."""
    segment: Segment | None
    """The new segment that begins with this prompt. None: the last segment continues."""
    raw_text: str | None = None
    """Text of `written_ids` if an agent wrote them. None: the chat template wrote them."""


class Transcript:
    """The segments of one episode so far."""

    def __init__(self, opening: Opening, speech: Speech, config: EpisodesConfig, *, is_compared: bool = False) -> None:
        """`is_compared`: compare each turn's prompt with the template's text of the whole conversation."""
        self._opening = opening
        self._speech = speech
        self._config = config
        self.segments: list[Segment] = []
        self.earned: dict[str, float] = {}
        """Earned rewards by name. Those without a name are only in the token rewards."""
        self.has_earned = False
        self.log: dict[str, float | str] = {}
        self.num_turns = 0
        self.num_calls = 0
        """Tool calls that the model wrote."""
        self.num_uncanonical: int | None = 0 if is_compared else None
        """Turns whose prompt the template would write differently. None: not compared, or an agent wrote a raw prompt."""
        self._context: tuple[Message, ...] | None = None
        """The history that the environment rewrote since the last turn; None if it did not."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Of the last turn; None before the first turn."""
        return FinishReason(self.segments[-1].turns[-1]["finish_reason"]) if self.segments else None

    def take(self, events: Sequence[Event]) -> None:
        """Applies the events since the last turn."""
        for event in events:
            if isinstance(event, Earned):
                self._earn(event)
            elif isinstance(event, Rewritten):
                self._context = event.messages
            elif isinstance(event, Withdrawn):
                self._withdraw(event.num_turns)
            else:
                assert isinstance(event, Logged)
                self.log[event.name] = event.value

    def prompt_for(self, asked: Asked) -> TurnPrompt:
        """Raises DataError for messages that the template refuses, for tools that the model has not seen, and for ids that the tokenizer
        does not know, and TooLongError for new messages that alone are too long. Raises EpisodeOver if the episode has reached a limit."""
        made = self._prompt_for(asked) if asked.raw is None else self._raw_prompt(asked.raw)
        most = self._speech.max_context
        if len(made.token_ids) < most:
            return made
        if (num_new := self._num_new(made, asked)) >= most:
            what = "the messages of this turn have" if asked.raw is None else "the new part of the prompt has"
            raise TooLongError(f"{what} {num_new} tokens, and the context takes {most}; shorten them")
        raise EpisodeOver(
            f"the context would have {len(made.token_ids)} tokens, and takes {most} with the turn", limit=Limit.CONTEXT
        )

    def add(self, asked: Asked, prompt: TurnPrompt, completion: Completion) -> Said:
        """Adds the turn that was sampled after this prompt, and returns it for the environment."""
        if prompt.segment is not None:
            self.segments.append(prompt.segment)
            self._context = None
        segment = self.segments[-1]
        if prompt.segment is None:
            segment.write(prompt.written_ids, policy_version=completion.policy_versions[0])
        segment.sample(completion)
        sampled_ids, raw_text = completion.token_ids, prompt.raw_text
        stops = asked.stop if completion.finish_reason is FinishReason.STOP else ()
        if raw_text is not None:
            self.num_uncanonical = None
        if self.num_uncanonical is not None:
            conversation = [*segment.messages, *asked.messages]
            self.num_uncanonical += not self._speech.is_canonical(prompt.token_ids, conversation, tools=segment.tools)
        if raw_text is None:
            reply = self._speech.hear(
                sampled_ids,
                written_ids=prompt.written_ids,
                tools=segment.tools,
                num_calls=self.num_calls,
            )
            ending = self._speech.ending(sampled_ids, stops=stops)
            added, text = asked.messages, None
        else:
            reply, ending = self._speech.hear_raw(sampled_ids, stops=stops), ""
            added = ({"role": "user", "content": raw_text},) if raw_text else ()
            text = (raw_text if prompt.segment is None else "") + self._speech.decode_on(sampled_ids)
        self.num_turns += 1
        segment.num_messages.append(len(segment.messages))
        self.num_calls += len(reply.calls)
        segment.messages += [*added, reply.as_message()]
        segment.texts.append(text)
        # Parsers strip white space at the end of a text.
        segment.endings.append(next((each for each in (ending, ending.rstrip()) if reply.text.endswith(each)), ""))
        return Said(
            text=reply.text,
            ending=segment.endings[-1],
            tool_calls=reply.calls,
            reasoning=reply.reasoning,
            finish_reason=completion.finish_reason,
            num_tokens=len(sampled_ids),
            num_context_tokens=len(prompt.token_ids) + len(sampled_ids),
            token_ids=tuple(sampled_ids) if asked.wants_token_ids else None,
            prompt_token_ids=tuple(prompt.token_ids) if asked.wants_token_ids else None,
        )

    def _prompt_for(self, asked: Asked) -> TurnPrompt:
        if self._context is not None:
            begun = self._speech.begin_anew([*self._context, *asked.messages], tools=asked.tools)
            return _beginning(begun, self._context, tools=asked.tools)
        if not self.segments:
            begun = self._opening.begin(asked.messages, tools=asked.tools)
            return _beginning(begun, self._opening.prompt.messages or (), tools=asked.tools)
        return self._going_on(asked)

    def _going_on(self, asked: Asked) -> TurnPrompt:
        segment, reason = self.segments[-1], self._require_may_go_on()
        if asked.tools and asked.tools != segment.tools:
            raise DataError(
                "these tools were not given from the first ask on, so the model has not seen them; give the same ones each time, or "
                "rewrite() the history"
            )
        start = segment.turns[-1]["start"]
        before, sampled = segment.token_ids[:start], segment.token_ids[start:]
        following = self._speech.turns.next_prompt(
            [*segment.prompt_token_ids, *before], sampled, asked.messages, finish_reason=reason, tools=segment.tools
        )
        if self._config.history == "template":
            whole = [*segment.messages, *asked.messages]
            if begun := self._speech.written_anew(following.token_ids, whole, tools=segment.tools):
                return _beginning(begun, segment.messages, tools=segment.tools)
        return TurnPrompt(token_ids=following.token_ids, written_ids=following.written_ids, segment=None)

    def _raw_prompt(self, raw: RawPrompt) -> TurnPrompt:
        """If `raw` begins with the whole context, only the rest is new: sampled tokens are not encoded again."""
        last = self.segments[-1] if self.segments and self._context is None else None
        if last is not None and (rest := self._rest_of(raw, last)) is not None:
            self._require_may_go_on()
            token_ids = [*last.context_ids, *rest.token_ids]
            return TurnPrompt(token_ids=token_ids, written_ids=rest.token_ids, segment=None, raw_text=rest.text)
        begun = self._speech.begin_raw(raw)
        return _beginning(begun, (), tools=(), raw_text=begun.text)

    def _num_new(self, made: TurnPrompt, asked: Asked) -> int:
        """Number of tokens in the prompt that no earlier turn had in its context. A new segment begins with a whole context again."""
        if made.segment is None or not self.segments:
            return len(made.written_ids)
        if asked.raw is not None:
            pairs = zip(made.token_ids, self.segments[-1].context_ids, strict=False)
            return len(made.token_ids) - sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        known = [each.get("content") or "" for segment in self.segments for each in segment.messages]
        given = [each.get("content") or "" for each in (*made.segment.messages, *asked.messages)]
        # An answer at the endpoint lacks the stop text that ended it.
        new = [text for text in given if not any(each.startswith(text) for each in known)]
        return sum(len(self._speech.turns.encoder.encode(text)) for text in new)

    def _rest_of(self, raw: RawPrompt, segment: Segment) -> EncodedPrompt | None:
        """The part of `raw` after the segment's context; None if `raw` does not begin with that context."""
        context = segment.context_ids
        if isinstance(raw, str):
            text = self._text_of(segment)
            begins, count = raw.startswith(text), len(text)
        else:
            begins, count = [*raw[: len(context)]] == context, len(context)
        return self._speech.go_on_raw(raw[count:], after=context[-1]) if begins else None

    def _text_of(self, segment: Segment) -> str:
        """Text of the segment's context: an agent's own texts as it wrote them, and each turn as it was sent to the agent."""
        decode, ids, written_from = self._speech.decode_on, segment.token_ids, 0
        for place, turn in enumerate(segment.turns):
            start, end = turn["start"], turn["end"]
            if segment.texts[place] is None:
                segment.texts[place] = decode(ids[written_from:start]) + decode(ids[start:end])
            written_from = end
        return "".join([segment.prompt_text, *(text or "" for text in segment.texts)])

    def _require_may_go_on(self) -> FinishReason:
        """Returns the last turn's finish reason. Raises EpisodeOver if that turn was truncated and `episodes.on_turn_length` is `end`."""
        reason = self.finish_reason
        assert reason is not None, "a segment has a turn"
        if reason is FinishReason.LENGTH and self._config.on_turn_length == "end":
            raise EpisodeOver(
                "the last turn was cut off at its length limit (episodes.on_turn_length)", limit=Limit.TURN_LENGTH
            )
        return reason

    def _withdraw(self, num_turns: int) -> None:
        """Drops the turn beyond the first `num_turns`: the environment never got it, so it must not train or earn."""
        if self.num_turns <= num_turns:
            return
        self.num_turns -= 1
        self.segments[-1].drop_last_turn()
        if not self.segments[-1].turns:
            self.segments.pop()

    def _earn(self, event: Earned) -> None:
        self.segments[-1].token_rewards[-1] += event.reward
        self.has_earned = True
        if event.name is not None:
            self.earned[event.name] = self.earned.get(event.name, 0.0) + event.reward


def _beginning(
    begun: EncodedPrompt,
    messages: Sequence[Message],
    *,
    tools: tuple[Mapping[str, Any], ...],
    raw_text: str | None = None,
) -> TurnPrompt:
    """The prompt that a new segment begins with. `messages` precede those of its first turn."""
    segment = Segment(prompt_text=begun.text, prompt_token_ids=begun.token_ids, messages=[*messages], tools=tools)
    return TurnPrompt(token_ids=begun.token_ids, written_ids=begun.token_ids, segment=segment, raw_text=raw_text)
