"""Reward and reference: what a sampled group still needs before it is worth training on. References in, references out.

The pool calls it for each group that comes from a worker. Both services are replaced when they die; a group whose judging kills
the reward service again and again is quarantined, as a prompt that kills workers is.
"""

from typing import Any

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import DeadlineError, WorkerError
from cluster.contracts.types import GroupSummary, Ticket
from cluster.remote.actor import ActorSpec
from cluster.rollouts.quarantine import Suspects
from cluster.supervision.supervisor import Start, SupervisedActor, Supervisor


def judging_deadline_s(config: RunConfig) -> float:
    """For a call of the reward service, which keeps a deadline per trajectory itself: everything that may be queued before it.

    Only a service that answers heartbeats and yet judges nothing meets this one; a dead or silent one is found much sooner.
    """
    buffer = config.buffer
    num_queued = buffer.groups_per_step * (buffer.max_off_policy_steps + 1) * buffer.trajectories_per_group
    return config.reward.timeout_s * num_queued + 60.0


class Scorers:
    """The reward service, and the reference scorer where the mathematics needs one."""

    def __init__(
        self,
        config: RunConfig,
        *,
        reward: ActorSpec,
        reference: ActorSpec | None,
        start: Start,
        supervisor: Supervisor,
        suspects: Suspects,
    ) -> None:
        self._config = config
        self._suspects = suspects
        self.reward = SupervisedActor(reward, start=start, supervisor=supervisor)
        self.reference = SupervisedActor(reference, start=start, supervisor=supervisor) if reference else None

    def places(self) -> list[SupervisedActor]:
        return [self.reward, *([self.reference] if self.reference else [])]

    async def judge(self, ticket: Ticket, reference: Any) -> tuple[GroupSummary, Any] | None:
        """The group with rewards; None when it is quarantined. Raises LostError when it went with its node."""
        deadline_s = judging_deadline_s(self._config)
        while True:
            alone = self._suspects.has(ticket)
            async with self._suspects.turn(alone=alone):
                actor = await self.reward.ready()
                try:
                    judged = await actor.call_for_batch("score", reference, deadline_s=deadline_s)
                except (WorkerError, DeadlineError) as error:
                    failure = error
                else:
                    if alone:
                        self._suspects.absolve(ticket)
                    return judged
            is_guilty = bool(self._suspects.blame([ticket], failure, alone=alone))
            await self.reward.replace(actor, failure)
            if is_guilty:
                return None

    async def refer(self, reference: Any) -> tuple[GroupSummary, Any] | None:
        """The group with reference log-probs; None when there is no reference scorer."""
        if self.reference is None:
            return None
        return await self.reference.call_for_batch("score", reference, deadline_s=self._config.reference.timeout_s)
