"""A group between its ticket and its batch: its engine requests and its rows."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from actors.chat.formatter import EncodedPrompt
from actors.rollout.engine_thread import EngineThread
from actors.rollout.sampling import own_sampling
from cluster.contracts.protocols import EngineRequest
from cluster.contracts.types import Completion, FinishReason, Ticket, sample_seed


class GroupInProgress:
    """The single-turn group of a ticket, from its requests to its rows."""

    def __init__(
        self,
        *,
        ticket: Ticket,
        encoded: EncodedPrompt,
        key: str,
        decode: Callable[[Sequence[int]], str],
        environment: str = "single_turn",
        place: int = 0,
        kept: pa.RecordBatch | None = None,
    ) -> None:
        """`key` begins the ids of this group's requests and is unique in the worker's life. `environment`: the run's name for the single
        turn. `place`: that of its requests in the queue, lowest first. `kept`: the completions and tokens of another worker, as `sampled`
        returned them.

        Raises DataError for a column of the prompt that is no valid sampling setting.
        """
        self.ticket = ticket
        self.key = key
        self._encoded = encoded
        self._decode = decode
        self._environment = environment
        self._place = place
        self._sampling = own_sampling(ticket.prompt, ticket.sampling)
        num_started = ticket.num_trajectories + ticket.num_extra_trajectories
        self._request_ids = [f"{key}/{index}" for index in range(num_started)]
        self._completions: dict[str, Completion] = {}
        self._kept: dict[str, Completion] = {}
        """Tokens of requests that another worker began and did not finish."""
        for row in kept.to_pylist() if kept else ():
            request_id = self._request_ids[row.pop("sample_index")]
            reason = FinishReason(row.pop("finish_reason"))
            sampled = self._kept if reason is FinishReason.ABORTED else self._completions
            sampled[request_id] = Completion(**row, finish_reason=reason)
        self._started_at = datetime.now(UTC)

    @property
    def is_finished(self) -> bool:
        return len(self._completions) == self.ticket.num_trajectories

    def requests(self) -> list[EngineRequest]:
        return [
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=self._encoded.token_ids,
                sampling=self._sampling,
                seed=sample_seed(self.ticket.seed, index),
                place=self._place,
                kept=self._kept.get(request_id),
            )
            for index, request_id in enumerate(self._request_ids)
            if request_id not in self._completions
        ]

    def sampled(self, kept: Mapping[str, Completion]) -> pa.RecordBatch | None:
        """For another worker that continues the group: the finished completions, and the unfinished ones in `kept`, by request id. None:
        there are none."""
        known = {**kept, **self._completions}
        rows = [
            {"sample_index": index, **asdict(known[request_id])}
            for index, request_id in enumerate(self._request_ids)
            if request_id in known
        ]
        return pa.RecordBatch.from_pylist(rows) if rows else None

    def add(self, request_id: str, completion: Completion) -> None:
        """The group is not finished: later completions are surplus."""
        self._completions[request_id] = completion

    def unfinished(self) -> list[str]:
        """Requests without a completion."""
        return [request_id for request_id in self._request_ids if request_id not in self._completions]

    def stop(self, engine: EngineThread) -> None:
        """Aborts its unfinished requests."""
        engine.abort(self.unfinished())

    def rows(self, *, run_id: str, worker: str) -> list[dict[str, Any]]:
        """One row per trajectory, in sample order, each with the index and seed that it started with. The group drops its completions."""
        common = {
            **columns_of(self.ticket, run_id=run_id, environment=self._environment, worker=worker),
            "prompt_token_ids": self._encoded.token_ids,
            "prompt_text": self._encoded.text,
            "reward_components": {},
            "started_at": self._started_at,
            "finished_at": datetime.now(UTC),
        }
        completions, self._completions = self._completions, {}  # a call keeps its groups until it ends
        return [
            {
                **common,
                "sample_index": index,
                "completion_token_ids": completion.token_ids,
                "loss_mask": [True] * len(completion.token_ids),
                "rollout_logprobs": completion.rollout_logprobs,
                "policy_versions": completion.policy_versions,
                "routed_experts": completion.routed_experts,
                "finish_reason": str(completion.finish_reason),
                "completion_text": self._decode(completion.token_ids),
                "seed": sample_seed(self.ticket.seed, index),
            }
            for index, request_id in enumerate(self._request_ids)
            if (completion := completions.get(request_id)) is not None
        ]


def columns_of(ticket: Ticket, *, run_id: str, environment: str, worker: str) -> dict[str, Any]:
    """The columns that are equal in all rows of the ticket's group."""
    return {
        "run_id": run_id,
        "group_id": ticket.group_id,
        "ticket_index": ticket.index,
        "prompt_id": ticket.prompt.prompt_id,
        "info": json.dumps(ticket.prompt.info(), sort_keys=True, ensure_ascii=False),
        "environment": environment,
        "worker": worker,
    }
