"""One episode: its environment asks for turns, the engine samples them, and the result is rows."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from actors.chat.formatter import EncodedPrompt, user_placeholder
from actors.rollout.episodes.speech import Opening, Speech, as_json
from actors.rollout.episodes.transcript import Segment, Transcript
from actors.rollout.sampling import own_sampling
from cluster.contracts.environment_config import EpisodesConfig
from cluster.contracts.episodes import Asked, EpisodeEnd, EpisodeTask, Message, Rewritten, Said
from cluster.contracts.errors import DataError
from cluster.contracts.protocols import EngineRequest
from cluster.contracts.sampling_config import PENALTIES, SamplingConfig
from cluster.contracts.types import Completion, FinishReason, Prompt, RewardStatus, Ticket, sample_seed

Sample = Callable[[EngineRequest], Awaitable[Completion]]
"""Raises `EngineRefusalError` if the engine refuses the request."""
_MILLION = 1_000_000
_LONG = 50_000
"""Characters above which a thread encodes the texts of a turn."""
_OF_THE_DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p", *PENALTIES)
"""Sampling settings that an agent at the endpoint may send only with the run's own values."""
ENVIRONMENT = "environment"
"""Name of the reward part that an environment returns, and prefix of its components' names."""


class EngineRefusalError(Exception):
    """The engine refuses this prompt, on any worker. It is not a DataError, which the environment could handle."""


class Play:
    """One episode of a group. It samples one turn after another, as its environment asks."""

    def __init__(
        self, ticket: Ticket, index: int, *, key: str, opening: Opening, speech: Speech, config: EpisodesConfig
    ) -> None:
        """`opening` is of the ticket's prompt. `key`: the group's, which begins the ids of its requests. `sample` is set before the first
        turn.

        Raises DataError for a column of the prompt that is no valid sampling setting.
        """
        self.ticket = ticket
        self.index = index
        self.seed = sample_seed(ticket.seed, index)
        self._key = key
        self._opening = opening
        self._speech = speech
        self.sample: Sample
        self._sampling = own_sampling(ticket.prompt, ticket.sampling)
        self._config = config
        self._num_tries = 0
        self.begin()

    def begin(self) -> None:
        """Starts anew: nothing of an earlier try remains."""
        self._num_tries += 1
        self._model_seconds = 0.0
        self._started_at = self._finished_at = datetime.now(UTC)
        is_compared = self.seed % _MILLION < self._config.compared_share * _MILLION
        self._transcript = Transcript(self._opening, self._speech, self._config, is_compared=is_compared)

    def ended(self, end: EpisodeEnd) -> EpisodeEnd:
        """Records the end. An episode without a turn has failed, even if its environment reports success."""
        self._finished_at = datetime.now(UTC)
        self._transcript.take(end.events)
        if self._transcript.segments or end.status is not RewardStatus.OK:
            return end
        why = "it never asked the model" if end.limit is None else f"its first turn met a limit: {end.limit}"
        return replace(end, status=RewardStatus.ERROR, failed_stage=ENVIRONMENT, message=why, limit=None)

    @property
    def task(self) -> EpisodeTask:
        ticket = self.ticket
        # A held-out prompt returns at each evaluation: that is a new task, not another try.
        evaluation = f"/{ticket.policy_version}" if ticket.index < 0 else ""
        id = f"{ticket.group_id}/{self.index}{evaluation}"
        return task_of(ticket.prompt, id=id, seed=ticket.seed, index=self.index, sampling=self._sampling)

    async def converse(self, asked: Asked) -> Said:
        """As `cluster.contracts.episodes.Converse`, but may also raise `EngineRefusalError`."""
        transcript = self._transcript
        transcript.take(asked.events)
        # In a thread, long texts keep the worker's event loop free: to encode a megabyte takes seconds.
        is_long = _num_characters(asked) > _LONG
        prompt = await asyncio.to_thread(transcript.prompt_for, asked) if is_long else transcript.prompt_for(asked)
        began = time.monotonic()
        completion = await self.sample(self._request(asked, prompt.token_ids))
        self._model_seconds += time.monotonic() - began
        return transcript.add(asked, prompt, completion)

    def rows(self, end: EpisodeEnd, common: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One row per segment. `common`: the columns of all rows of the group. `end`: as `ended` returned it."""
        transcript = self._transcript
        shared = {
            **common,
            **_verdict(end, transcript.earned),
            "sample_index": self.index,
            "seed": self.seed,
            "model_seconds": self._model_seconds,
            "started_at": self._started_at,
            "finished_at": self._finished_at,
            "episode": as_json(
                {
                    "num_calls": end.num_calls,
                    "num_malformed_calls": end.num_malformed_calls,
                    "num_uncanonical_turns": transcript.num_uncanonical,
                    "num_written_tokens": sum((each.num_written() for each in transcript.segments), Counter[str]()),
                    "num_retries": self._num_tries - 1,
                    "replies": [each.replies for each in transcript.segments],
                    "tools": _tools(transcript.segments),
                    "endings": [each.endings for each in transcript.segments],
                    "log": transcript.log,
                }
            ),
        }
        segments = transcript.segments or [self._unbegun()]
        rows = [
            {
                **shared,
                "segment_index": index,
                "num_segments": len(segments),
                "prompt_text": segment.prompt_text,
                "prompt_token_ids": segment.prompt_token_ids,
                "completion_token_ids": segment.token_ids,
                "completion_text": self._speech.decode(segment.token_ids),
                "loss_mask": segment.loss_mask,
                "rollout_logprobs": segment.logprobs,
                "policy_versions": segment.policy_versions,
                "routed_experts": segment.routed_experts,
                "token_rewards": segment.token_rewards if transcript.has_earned else None,
                "turns": segment.turns,
                "messages": as_json(segment.messages),
                "finish_reason": str(transcript.finish_reason or FinishReason.ABORTED),
            }
            for index, segment in enumerate(segments)
        ]
        if end.limit is not None:
            rows[-1]["finish_reason"] = str(FinishReason.LENGTH)
        return rows

    def _request(self, asked: Asked, prompt_token_ids: list[int]) -> EngineRequest:
        sampling, turn = self._sampling, self._transcript.num_turns
        limit = sampling.max_tokens if asked.max_tokens is None else min(asked.max_tokens, sampling.max_tokens)
        own = {
            "max_tokens": limit,
            "min_tokens": min(sampling.min_tokens, limit),
            "stop": (*sampling.stop, *asked.stop),
        }
        return EngineRequest(
            request_id=f"{self._key}/{self.index}.{self._num_tries}.{turn}",
            prompt_token_ids=prompt_token_ids,
            sampling=sampling.model_copy(update=own),
            seed=sample_seed(self.seed, turn),
            place=self.ticket.place,
        )

    def _unbegun(self) -> Segment:
        """The segment of an episode that ended before its first turn: only the prompt."""
        begun = unasked(self._opening)
        messages: list[Message] = [*(self.ticket.prompt.messages or ())]
        return Segment(prompt_text=begun.text, prompt_token_ids=begun.token_ids, messages=messages)


def unasked(opening: Opening) -> EncodedPrompt:
    """The prompt alone. If the template refuses a system message without a user's, which the environment's first ask may add, with a
    placeholder for it. Raises DataError as `Speech.begin`."""
    try:
        return opening.begin()
    except DataError:
        if not (placeholder := user_placeholder(opening.prompt)):
            raise
        return opening.begin(placeholder)


def _num_characters(asked: Asked) -> int:
    """Of the texts that are encoded for a turn."""
    rewritten = [message for event in asked.events if isinstance(event, Rewritten) for message in event.messages]
    texts = [
        asked.raw if isinstance(asked.raw, str) else "",
        *(each.get("content") for each in (*rewritten, *asked.messages)),
    ]
    return sum(len(each) for each in texts if isinstance(each, str))


def _tools(segments: Sequence[Segment]) -> list[Sequence[Any]]:
    """The tools of each segment; once if they are equal in all segments, since schemas are long."""
    found: list[Sequence[Any]] = [each.tools for each in segments]
    return found[:1] if all(each == found[0] for each in found) else found


def _verdict(end: EpisodeEnd, earned: Mapping[str, float]) -> dict[str, Any]:
    """The environment's part of the reward columns; the reward service adds the judges' parts."""
    if end.status is not RewardStatus.OK:
        return {
            "reward": None,
            "reward_status": str(end.status),
            "reward_message": end.message,
            "failed_stage": end.failed_stage,
            "reward_components": [],
        }
    components: dict[str, float | None] = {f"earned/{name}": value for name, value in earned.items()}
    # At a limit the policy keeps the rewards that it earned, and gets 0 for the episode.
    reward = end.reward if end.limit is None else 0.0
    if reward is not None:
        components[ENVIRONMENT] = reward
        components |= {f"{ENVIRONMENT}/{name}": value for name, value in end.components.items()}
    return {
        "reward": reward,
        "reward_status": None if reward is None else str(RewardStatus.OK),
        "reward_components": [*components.items()],
    }


def task_of(prompt: Prompt, *, id: str, seed: int, index: int, sampling: SamplingConfig) -> EpisodeTask:
    """The prompt as an environment gets it. Its text is the prompt's text, or its last message's."""
    messages = tuple(prompt.messages or ())
    text = prompt.text if prompt.text is not None else str((messages[-1:] or ({},))[0].get("content") or "")
    return EpisodeTask(
        id=id,
        prompt=text,
        messages=messages,
        columns=prompt.columns,
        seed=seed,
        index=index,
        sampling={name: getattr(sampling, name) for name in _OF_THE_DISTRIBUTION},
    )
