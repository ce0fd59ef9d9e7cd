"""The loop of a run: workers sample, the learner learns, the weights return to the workers. It handles object refs only."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.contracts.config import MismatchConfig, RunConfig
from cluster.contracts.errors import DeadlineError, LostError, MismatchError, StalenessError
from cluster.contracts.protocols import Events, PromptSource, WorkerFleet
from cluster.contracts.types import BroadcastStats, Group, Prompt, StepStats, Ticket, sample_seed
from cluster.metrics import step_metrics
from cluster.rollouts.destinations import HeldOutGroups
from cluster.scores import scores
from cluster.supervision.tasks import background


class Buffer(Protocol):
    """Finished groups in start order, inside the staleness bound."""

    async def take(self, count: int, *, stall_s: float, goes_on: Callable[[], bool]) -> list[tuple[int, Group]]:
        """Returns the first `count` groups with their indices, once all of them are finished. Raises DeadlineError if nothing changes for
        `stall_s` and `goes_on` is then False."""
        ...

    def put_back(self, taken: Sequence[tuple[int, Group]], *, lost: Collection[int]) -> None:
        """Takes back groups that were not consumed. Those in `lost` are under way again."""
        ...

    def advance(self, version: int) -> None:
        """Lets further groups start, since workers have loaded `version`."""
        ...

    def drain_stats(self) -> dict[str, float]: ...


class Rollouts(Protocol):
    """Makes judged groups."""

    def generating(self, *, into: Any) -> AbstractAsyncContextManager[None]:
        """While this is open, every group that the buffer lets start is under way. A failed producer ends the block with its error."""
        ...

    def sample_again(self, indices: Collection[int]) -> None:
        """Samples groups again that were lost after they were taken."""
        ...

    async def evaluate(self, tickets: Sequence[Ticket], *, stall_s: float) -> HeldOutGroups:
        """Raises DeadlineError if nothing changes for `stall_s`, unless the run waits for nodes."""
        ...

    def waits_for_nodes(self) -> bool:
        """Whether nothing can change before a new node comes, for which the run waits without limit."""
        ...

    def drain_stats(self) -> dict[str, float]: ...

    def describe(self) -> str:
        """The present state of every actor, for the error of a missed deadline."""
        ...


class Learner(Protocol):
    """All ranks of the learner as one."""

    version: int

    async def update(self, groups: Sequence[tuple[int, Group]]) -> StepStats:
        """Raises LostError, without recording anything, if a group was lost with its node."""
        ...

    async def lost(self, groups: Sequence[tuple[int, Group]]) -> set[int]:
        """Indices of the groups that were lost with a node."""
        ...

    def rate(self, metric: float) -> None:
        """Sets the evaluation of the current version, for a save that comes before the next step."""
        ...

    def is_save_due(self) -> bool: ...

    async def save(self, metric: float | None) -> None:
        """Saves a checkpoint of the current version. `metric` is its evaluation, if any."""
        ...


class Weights(Protocol):
    """Brings the weights from the learner to the workers."""

    async def begin_broadcast(self) -> BroadcastStats:
        """Publishes the weights. When this returns, the learner may continue."""
        ...

    async def finish_broadcast(self, fleet: WorkerFleet, published: BroadcastStats) -> BroadcastStats:
        """Raises WeightsError when most workers cannot prove the version; a single worker that fails is being replaced.

        If the `published` version was lost with the learner's node, workers serve a later one in the end.
        """
        ...

    def stats(self) -> dict[str, float]: ...


class Timesheet(Protocol):
    """Records what the actors spend their time on."""

    def enter(self, stage: str, *, step: int | None = None) -> None:
        """Begins a stage of the driver, for this step."""
        ...

    def ask(self) -> None:
        """Asks the actors for their phases. Returns at once; `drain_stats` has the answers received by then."""
        ...

    def drain_stats(self) -> dict[str, float]: ...


class Log(Events, Protocol):
    """Receives metrics and events."""

    def step(self, version: int, metrics: dict[str, float]) -> None: ...

    def pending(self, version: int, metrics: dict[str, float]) -> None:
        """Takes the numbers of a step that is not over yet. `written` logs them if it comes before `step` of this version."""
        ...

    async def written(self, *, within_s: float | None = None) -> None:
        """Returns once the steps so far are as durable as a checkpoint of the last one. A resumed run does not log them again. Raises
        TimeoutError after `within_s`."""
        ...

    def keep_errors(self) -> None:
        """From now on no call raises an error of an earlier write. The end of the log does: a run that ends saves first."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Samples held-out prompts under the weights that workers serve now."""

    config: RunConfig
    source: PromptSource | Sequence[Prompt]
    num_too_long: int = 0
    """Number of prompts that were too long and replaced by later ones of the source."""
    thread: Executor | None = None
    """Thread in which prompts are made; None is the event loop's own."""

    async def run(self, rollouts: Rollouts, *, version: int, log: Log) -> dict[str, float]:
        """Metrics of one evaluation."""
        began = time.monotonic()
        tickets = await asyncio.get_running_loop().run_in_executor(self.thread, self.tickets, version)
        identity = self.config.evaluation.identity
        log.event("evaluating", num_prompts=len(tickets), policy_version=version, identity=identity)
        held_out = await rollouts.evaluate(tickets, stall_s=self.config.stall_s)
        # Groups arrive as they finish, and sums in another order would not be equal bit for bit.
        summaries = sorted(held_out.summaries, key=lambda summary: summary.group_id)
        num_known = sum(len(summary.known_rewards) for summary in summaries)
        return {
            **scores(
                summaries,
                success_at=self.config.evaluation.success_at,
                num_samples=self.config.evaluation.num_samples,
                sources=self._sources(tickets),
                words=self._words(tickets),
            ),
            "eval/num_failed": float(sum(summary.num_trajectories for summary in summaries) - num_known),
            "eval/num_dropped": float(held_out.num_dropped),
            "eval/num_prompts": float(len(summaries)),
            "eval/num_too_long": float(self.num_too_long),
            "time/eval_s": time.monotonic() - began,
        }

    def _sources(self, tickets: Sequence[Ticket]) -> dict[str, str]:
        """Group id to the source of its prompt, for prompts that name one."""
        column = self.config.evaluation.source_column
        return {
            ticket.group_id: str(ticket.prompt.columns[column])
            for ticket in tickets
            if column is not None and ticket.prompt.columns.get(column) is not None
        }

    def _words(self, tickets: Sequence[Ticket]) -> dict[str, str]:
        """Group id to the text of its prompt. Empty with environments, which may make different tasks of the same text."""
        if self.config.has_episodes:
            return {}
        return {ticket.group_id: str((ticket.prompt.messages, ticket.prompt.text)) for ticket in tickets}

    def tickets(self, version: int) -> list[Ticket]:
        """The first prompts of the source, the same at every evaluation. Their indices are negative: they never train, and an environment
        that makes its task from the seed makes no task of a training group."""
        held_out = self.config.evaluation
        sampling = self.config.sampling.model_copy(update={"temperature": held_out.temperature})
        return [
            Ticket(
                index=-1 - place,
                prompt=self.source[place],
                num_trajectories=held_out.num_samples,
                seed=sample_seed(self.config.seed, -1 - place),
                policy_version=version,
                sampling=sampling,
            )
            for place in range(min(held_out.num_prompts, len(self.source)))
        ]


async def train(
    config: RunConfig,
    *,
    rollouts: Rollouts,
    fleet: WorkerFleet,
    learner: Learner,
    buffer: Buffer,
    weights: Weights,
    log: Log,
    timesheet: Timesheet,
    evaluator: Evaluator | None = None,
) -> None:
    """Trains until `num_steps`. Before this is called, the learner is restored and the workers serve its weights, attested.

    With `config.broadcasts_beside_learning`, workers load the weights of a step while the learner takes groups for the next one and learns.
    Evaluations and saves wait for the end of the broadcast.
    """
    version = learner.version
    ends = _StepEnds(fleet=fleet, buffer=buffer, weights=weights, log=log, mismatch=config.mismatch)
    if version == 0 and evaluator:
        timesheet.enter("evaluation", step=version)
        log.step(version, await evaluator.run(rollouts, version=version, log=log))
    async with rollouts.generating(into=buffer), ends.beside():
        began: float | None = None
        while version < config.num_steps:
            began = began or time.monotonic()  # a step that lost groups began before it lost them
            timesheet.enter("waiting for rollouts", step=version + 1)
            # In start order, inside the staleness bound.
            groups = await _take(config, rollouts=rollouts, buffer=buffer, ends=ends)
            _check_staleness(groups, version=version, bound=config.buffer.max_off_policy_steps)
            timesheet.enter("learning", step=version + 1)
            try:
                stats = await learner.update(groups)  # advantages -> micro-batches -> loss -> optimizer step
            except LostError as error:  # groups were lost with a node: nothing was recorded, and they are sampled again
                lost = await learner.lost(groups)
                log.event("groups_lost", groups=sorted(lost), reason=str(error))
                buffer.put_back(groups, lost=lost)
                rollouts.sample_again(lost)
                continue
            summaries = [group.summary for _, group in groups]
            del groups  # frees their trajectories in the object store
            version = stats.policy_version
            learned = time.monotonic()
            timesheet.enter("sending weights", step=version)
            timesheet.ask()
            await ends.over()  # workers load one version after another
            published = await weights.begin_broadcast()
            is_evaluated = evaluator is not None and _is_due(config.evaluation.every_steps, version, config.num_steps)
            is_waited_for = is_evaluated or learner.is_save_due() or _is_stopped(stats, config.mismatch)
            sent = None
            if is_waited_for or not config.broadcasts_beside_learning:
                sent = await weights.finish_broadcast(fleet, published)
            now = time.monotonic()
            metrics = step_metrics(summaries, stats)
            metrics |= {"time/step_s": now - began, "weights/learner_wait_s": now - learned}
            metrics |= {**rollouts.drain_stats(), **buffer.drain_stats(), **timesheet.drain_stats()}
            began = None
            if sent is None:
                ends.start(stats, published, metrics)
                continue
            metrics |= weights.stats()
            held_out: dict[str, float] = {}
            if evaluator and is_evaluated:
                timesheet.enter("evaluation", step=version)
                held_out = await evaluator.run(rollouts, version=version, log=log)
                learner.rate(held_out["eval/reward"])
            ends.tell(stats, sent, metrics | held_out)
            if not config.rollout.colocated:
                ends.let_start(sent)
            if learner.is_save_due():
                # Only its own evaluation may rate it: an older one would keep the wrong checkpoint as the best.
                timesheet.enter("saving", step=version)
                await learner.save(held_out.get("eval/reward"))
            if config.rollout.colocated:
                ends.let_start(sent)  # engines sleep while the learner saves
        await ends.over()


class _StepEnds:
    """Ends of steps: workers serve the weights, further groups may start, the step is logged. One may run while the next step learns."""

    def __init__(
        self, *, fleet: WorkerFleet, buffer: Buffer, weights: Weights, log: Log, mismatch: MismatchConfig
    ) -> None:
        self._fleet, self._buffer, self._weights, self._log = fleet, buffer, weights, log
        self._mismatch = mismatch
        self._tasks: asyncio.TaskGroup | None = None
        self._coming: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        """While this is open, ends may run beside the block. One that fails ends the block with its error."""
        async with background() as self._tasks:
            yield

    def start(self, stats: StepStats, published: BroadcastStats, metrics: dict[str, float]) -> None:
        """Returns at once. The next end waits until this one is `over`."""
        assert self._tasks is not None, "ends come beside an open block"
        # The learner may die beside the end, and save this step on its way back.
        self._log.pending(stats.policy_version, metrics)
        self._coming = self._tasks.create_task(self._come(stats, published, metrics))

    @property
    def is_one_coming(self) -> bool:
        return self._coming is not None and not self._coming.done()

    async def over(self) -> None:
        """Waits for the end that is running, if any."""
        if self._coming is not None:
            await self._coming
            self._coming = None

    def tell(self, stats: StepStats, sent: BroadcastStats, metrics: dict[str, float]) -> None:
        """Raises MismatchError for a step after which the run must stop."""
        self._log.step(stats.policy_version, metrics)
        self._log.event(
            "broadcast", policy_version=sent.policy_version, digest=sent.digest, num_workers=len(sent.attestations)
        )
        _check_mismatch(stats, self._mismatch, self._log)

    def let_start(self, sent: BroadcastStats) -> None:
        """Lets further groups start, now that workers serve the weights."""
        self._buffer.advance(sent.policy_version)

    async def _come(self, stats: StepStats, published: BroadcastStats, metrics: dict[str, float]) -> None:
        try:
            sent = await self._weights.finish_broadcast(self._fleet, published)
        except asyncio.CancelledError:
            # The run ends, and its own reason is to be raised.
            self._log.keep_errors()
            # If the next step is saved, no later driver logs this step again.
            self._log.step(stats.policy_version, metrics)
            self._tell_published(published)
            raise
        if sent.policy_version != published.policy_version:
            self._tell_published(published)
        self.let_start(sent)
        self.tell(stats, sent, metrics | self._weights.stats())

    def _tell_published(self, published: BroadcastStats) -> None:
        """A replay compares with the digest that each step published, whether or not the weights arrived."""
        self._log.event("published", policy_version=published.policy_version, digest=published.digest)


async def _take(config: RunConfig, *, rollouts: Rollouts, buffer: Buffer, ends: _StepEnds) -> list[tuple[int, Group]]:
    goes_on = lambda: ends.is_one_coming or rollouts.waits_for_nodes()  # a broadcast has its own deadlines
    try:
        return await buffer.take(config.buffer.groups_per_step, stall_s=config.stall_s, goes_on=goes_on)
    except DeadlineError as error:
        raise DeadlineError(f"{error}; {rollouts.describe()}") from None


def _is_due(every_steps: int | None, version: int, num_steps: int) -> bool:
    return version == num_steps or (every_steps is not None and version % every_steps == 0)


def _check_staleness(groups: Sequence[tuple[int, Group]], *, version: int, bound: int) -> None:
    """Checks the bound on the trajectories themselves."""
    for index, group in groups:
        if version - group.summary.min_policy_version > bound:
            raise StalenessError(
                f"group {index} has a token of policy version {group.summary.min_policy_version}, the learner is at "
                f"{version}, buffer.max_off_policy_steps={bound}: a bug in treadwheel; the run stops before it trains on it"
            )


def _mismatch(stats: StepStats) -> float:
    return stats.metrics.get("mismatch/mean_abs_nats", 0.0)


def _is_stopped(stats: StepStats, limits: MismatchConfig) -> bool:
    """Whether the mismatch ends the run with this step."""
    return limits.stop_nats is not None and _mismatch(stats) > limits.stop_nats


def _check_mismatch(stats: StepStats, limits: MismatchConfig, log: Log) -> None:
    mismatch = _mismatch(stats)
    if mismatch > limits.alarm_nats:
        log.event("mismatch_alarm", policy_version=stats.policy_version, mean_abs_nats=mismatch)
    if _is_stopped(stats, limits):
        raise MismatchError(
            f"rollout and learner log-probs differ by {mismatch:.4g} nats on average in step {stats.policy_version}, more than "
            f"mismatch.stop_nats={limits.stop_nats:g}; its trajectories are trajectories/step-{stats.policy_version:06d}*.arrow"
        )
