"""The rollouts' parts put together for tests, as deploy/cluster_up/wiring.py does for runs."""

import asyncio
from collections.abc import Callable
from typing import Any

from cluster.contracts.reward_config import RewardConfig
from cluster.contracts.types import ActorKind, GroupSummary
from cluster.remote.actor import ActorSpec, RemoteActor
from cluster.rollouts.destinations import TrainingGroups
from cluster.rollouts.dispatcher import Dispatcher
from cluster.rollouts.production import Production
from cluster.rollouts.quarantine import Suspects
from cluster.rollouts.scoring import Scorers
from cluster.rollouts.tickets import TicketOffice
from cluster.rollouts.worker_pool import WorkerPool
from cluster.supervision.supervisor import Start, SupervisedActor, Supervisor
from tests.fakes import ListedEvents, actor_spec


def wired(
    fleet: WorkerPool,
    office: TicketOffice,
    *,
    start: Start,
    supervisor: Supervisor,
    events: ListedEvents,
    tasks: asyncio.TaskGroup,
    max_sequences: int,
    sequences_per_group: int,
    dropped_by: Callable[[GroupSummary], str | None] = lambda summary: None,
    choose: Callable[[GroupSummary], list[int]] | None = None,
    wants_reference: Callable[[int], bool] | None = None,
    sampling_deadline_s: float = 600.0,
    judging_deadline_s: float = 60.0,
    is_deterministic: bool = False,
    num_services: int = 1,
    reward: RewardConfig = RewardConfig(),  # noqa: B008 - frozen
    may_wait_for_nodes: bool = False,
) -> Production:
    """A production over `fleet`, whose reward services `start` starts, and its reference scorer where groups want one."""

    def suspects() -> Suspects:
        return Suspects(max_failures=supervisor.config.max_prompt_failures, events=events)

    def service(number: int) -> ActorSpec:
        return actor_spec(f"reward-{number}", ActorKind.REWARD_SERVICE)

    async def join(actor: RemoteActor) -> None: ...

    def scorer(name: str, kind: ActorKind) -> Any:
        return SupervisedActor(actor_spec(name, kind), start=start, supervisor=supervisor)

    scorers = Scorers(
        models={name: scorer(f"reward-model-{name}", ActorKind.REWARD_MODEL) for name in reward.models},
        reward=reward,
        services=WorkerPool(
            [service(number) for number in range(num_services)],
            joining=service,
            start=start,
            supervisor=supervisor,
            join=join,
            tasks=tasks,
        ),
        reference=scorer("reference", ActorKind.REFERENCE_SCORER) if wants_reference else None,
        suspects=suspects(),
        events=events,
        tasks=tasks,
        judging_deadline_s=judging_deadline_s,
        reference_timeout_s=judging_deadline_s,
    )
    dispatcher = Dispatcher(
        fleet=fleet,
        scorers=scorers,
        suspects=suspects(),
        events=events,
        tasks=tasks,
        max_sequences_per_worker=max_sequences,
        sequences_per_group=sequences_per_group,
        timeout_s=sampling_deadline_s,
        is_deterministic=is_deterministic,
    )
    return Production(
        fleet=fleet,
        scorers=scorers,
        dispatcher=dispatcher,
        office=office,
        supervisor=supervisor,
        destination=lambda buffer: TrainingGroups(
            buffer,
            scorers=scorers,
            dropped_by=dropped_by,
            choose=choose,
            wants_reference=wants_reference or (lambda index: False),
            max_failed_share=0.5,
            events=events,
        ),
        may_wait_for_nodes=may_wait_for_nodes,
    )
