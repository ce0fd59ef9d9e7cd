"""Adds rewards and reference log-probs to sampled groups, as columns.

A reward service that dies is replaced while the others serve; one that leaves finishes its groups first. A group whose judging kills reward
services again and again is quarantined.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from functools import partial

from cluster.contracts.errors import DeadlineError, WorkerError
from cluster.contracts.protocols import Events
from cluster.contracts.reward_config import RewardConfig
from cluster.contracts.types import Group, GroupSummary, Scores, Ticket
from cluster.remote.actor import RemoteActor
from cluster.rollouts.holds import Holds
from cluster.rollouts.judge_servers import JudgeServers
from cluster.rollouts.part_metrics import PartMetrics
from cluster.rollouts.prints import Prints
from cluster.rollouts.quarantine import Suspects, may_be_their_doing
from cluster.rollouts.reference_calls import ReferenceCalls
from cluster.rollouts.shared_calls import SharedCalls
from cluster.rollouts.worker_pool import Member, WorkerPool
from cluster.supervision.supervisor import SupervisedActor

_MOST_MESSAGES = 16
"""Kinds of failed rewards that get a message in a run. Further kinds are in the events only."""


class Scorers:
    """The reward services, the reward models, and the reference scorer if the objective needs one."""

    def __init__(
        self,
        *,
        services: WorkerPool,
        models: Mapping[str, SupervisedActor],
        reference: SupervisedActor | None,
        servers: JudgeServers | None = None,
        suspects: Suspects,
        events: Events,
        tasks: asyncio.TaskGroup,
        reward: RewardConfig,
        judging_deadline_s: float,
        reference_timeout_s: float,
        source_column: str | None = None,
        keep: Callable[[Mapping[str, str]], None] = lambda verdicts: None,
    ) -> None:
        """`suspects`: prompts blamed for deaths of reward services, apart from those blamed for deaths of rollout workers. `source_column`:
        the column that names a prompt's source, for metrics by source; None: no such metrics. `keep` stores verdicts, so that judges are
        not asked again."""
        self.services = services
        self._calls: dict[RemoteActor, SharedCalls] = {}
        self._tasks = tasks
        self._models = models
        self._model_turns = {name: asyncio.Lock() for name in models}
        self._reward = reward
        self._reference = reference
        self._reference_calls = ReferenceCalls(reference, timeout_s=reference_timeout_s) if reference else None
        self._servers = servers
        self._suspects = suspects
        self._judging_deadline_s = judging_deadline_s
        self._failed_rewards = FailedRewards(events)
        self._part_metrics = PartMetrics(source_column=source_column)
        self._keep = keep
        self._holds = Holds(events)
        self._prints = Prints(events)
        self._turns = _Turns()

    def places(self) -> list[SupervisedActor]:
        reference = [self._reference] if self._reference else []
        servers = self._servers.places() if self._servers else []
        return [*self.services.places(), *self._models.values(), *reference, *servers]

    async def judge(self, ticket: Ticket, group: Group) -> Group | None:
        """The group with its rewards; None when it is quarantined. Failed rewards are events. Raises LostError when the group was lost with
        its node, and UnavailableError, which ends the run, when an endpoint of a judge was away for too long."""
        if self._suspects.is_guilty(ticket):
            return None
        scores = await self._scores(ticket, group)
        while True:
            alone = self._suspects.has(ticket)
            async with self._turns.turn(alone=alone):
                if self._suspects.is_guilty(ticket):
                    return None
                member, actor = await self._least_busy()
                if self._suspects.has(ticket) and not alone:
                    continue  # another group of its prompt was blamed while this one waited for a service
                try:
                    with member.in_use():
                        columns = await self._calls_of(actor).score(group, scores)
                except (WorkerError, DeadlineError) as error:
                    if may_be_their_doing(error, given_up=member.place.failure_of(actor)):
                        self._suspects.blame([ticket], error, alone=alone)
                    # Within the turn, so that no other group calls the failed actor and is blamed for it.
                    self.services.replace(actor, error)
                else:
                    if columns is None:
                        continue
                    self._suspects.absolve(ticket)
                    member.place.note_success()
                    judged = group.with_columns(*columns)
                    self._failed_rewards.note(judged.summary)
                    self._part_metrics.note(ticket, judged.summary)
                    for part in judged.summary.part_stats.values():
                        self._keep(part.verdicts)
                    return judged

    async def _scores(self, ticket: Ticket, group: Group) -> list[Scores]:
        """Scores of the reward models in the group's recipe, one dict per trajectory. Waits while a model that died is replaced."""
        if not self._models:
            return []
        names = self._reward.models_for(ticket.prompt.info())
        of_models = await asyncio.gather(*(self._scores_of(name, group) for name in names))
        return [dict(zip(names, each, strict=True)) for each in zip(*of_models, strict=True)]

    async def _scores_of(self, name: str, group: Group) -> list[dict[str, float] | str]:
        # A model scores one group after another. With this lock, the wait for earlier groups does not count against the deadline.
        async with self._model_turns[name]:
            return await self._models[name].call("score", *group.pieces, deadline_s=self._reward.models[name].timeout_s)

    def drain_stats(self) -> dict[str, float]:
        """Metrics of the reward parts since the last call."""
        return self._part_metrics.drain() | self._holds.drain()

    def note_progress(self) -> None:
        """Logs events from the services' latest progress: parts that hold or go on, and lines that judges print."""
        reports = [progress for place in self.services.places() if (progress := place.progress())]
        self._holds.note(hold for progress in reports for hold in progress.holds)
        self._prints.note(reports)

    async def _least_busy(self) -> tuple[Member, RemoteActor]:
        """The service with the fewest groups, and its actor; waits until one serves. Call it at once: a group counts only from its call
        on."""
        up = [(member, member.actor) for member in await self.services.some_serving() if member.actor]
        return min(up, key=lambda one: len(self._calls_of(one[1])))

    def _calls_of(self, actor: RemoteActor) -> SharedCalls:
        if actor not in self._calls:
            living = self.services.workers()
            self._calls = {each: calls for each, calls in self._calls.items() if each in living}
            self._calls[actor] = SharedCalls(
                actor,
                tasks=self._tasks,
                deadline_s=self._judging_deadline_s,
                give_up=partial(self.services.replace, actor),
                servers=self._servers,
            )
        return self._calls[actor]

    async def with_reference_logprobs(self, group: Group) -> Group:
        """The group itself when there is no reference scorer. Raises LostError when the group was lost with its node."""
        if self._reference_calls is None:
            return group
        return group.with_columns(*await self._reference_calls.columns_of(group))


class FailedRewards:
    """Logs failed rewards, with a message for each new kind of failure."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._known_kinds: set[str] = set()

    def note(self, summary: GroupSummary) -> None:
        """Logs `reward_failure` if a reward of this group failed, or a part left its recipe."""
        if not (summary.num_failed_rewards or summary.reward_failures):
            return
        new_kinds = [failure.kind for failure in summary.reward_failures if failure.kind not in self._known_kinds]
        has_message = bool(new_kinds) and len(self._known_kinds) < _MOST_MESSAGES
        self._known_kinds.update(new_kinds if has_message else ())
        self._events.event(
            "reward_failure",
            group_id=summary.group_id,
            prompt_id=summary.prompt_id,
            num_errors=summary.num_reward_errors,
            num_timeouts=summary.num_reward_timeouts,
            failures=[asdict(failure) for failure in summary.reward_failures],
            **({"message": f"prompt {summary.prompt_id!r}: {describe(summary)}"} if has_message else {}),
        )


def describe(summary: GroupSummary) -> str:
    """`3 of 8 rewards failed: KeyError: 'anser'`, with each kind's first message."""
    reasons = "; ".join(failure.message for failure in summary.reward_failures) or "no reason given"
    return f"{summary.num_failed_rewards} of {summary.num_trajectories} rewards failed: {reasons}"


class _Turns:
    """Many turns at the same time, or one alone. While one waits to be alone, no other begins, so that it is not overtaken for ever."""

    def __init__(self) -> None:
        self._num_running = 0
        self._num_waiting_alone = 0
        self._is_one_alone = False
        self._ended = asyncio.Event()

    @contextlib.asynccontextmanager
    async def turn(self, *, alone: bool) -> AsyncIterator[None]:
        self._num_waiting_alone += alone
        try:
            while not (self._may_run_alone() if alone else self._may_run()):
                self._ended.clear()
                await self._ended.wait()
        finally:
            self._num_waiting_alone -= alone
        self._num_running += 1
        self._is_one_alone = alone
        try:
            yield
        finally:
            self._num_running -= 1
            self._is_one_alone = False
            self._ended.set()

    def _may_run(self) -> bool:
        return not self._is_one_alone and not self._num_waiting_alone

    def _may_run_alone(self) -> bool:
        return not self._num_running
