"""Brings the learner's weights to all workers, including those that join later. No worker samples under unproven weights.

The transport moves the bytes and collects the proofs. `Weights` decides when each worker gets them, and handles failed proofs.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Self

from cluster.contracts.config import WeightsConfig
from cluster.contracts.errors import LostError, TreadwheelError, WeightsError, WorkerError
from cluster.contracts.plugins import TRANSPORTS, resolve
from cluster.contracts.protocols import ActorHandle, Events, PublishingLearner, Transport, WorkerFleet
from cluster.contracts.types import BroadcastStats
from cluster.contracts.usage import Uses

_MOST_LOST = 3
"""How often, in one broadcast or one join, weights are published again because one worker could not get them. Then it has failed."""


class Weights:
    """The published version, and its proofs by worker."""

    def __init__(
        self,
        transport: Transport,
        *,
        learner: PublishingLearner,
        num_workers: int,
        events: Events,
        waits_for_joins: bool = True,
    ) -> None:
        """`num_workers`: how many workers will join before the first broadcast. Without `waits_for_joins`, broadcasts do not wait for
        workers that join: with turns, a joining worker's load waits for the engines' turn, which comes with the broadcast."""
        self._waits_for_joins = waits_for_joins
        self._transport = transport
        self._learner = learner
        self._events = events
        self._num_workers = num_workers
        """Number of workers of the last broadcast; before the first one, number of workers that will join."""
        self._version = -1
        self._proofs: dict[str, WeightsError | None] = {}
        """By worker: the error of its last proof of this version, None for a valid proof."""
        self._num_refused = 0
        self._is_published = asyncio.Event()
        self._is_sent = asyncio.Event()
        self._is_sent.set()
        self._overtaken = Uses()
        """One for each worker that loads again because a broadcast overtook its first load. The next broadcast waits for them."""
        self._last: BroadcastStats | None = None
        self._lost: BroadcastStats | None = None
        """The value of `_last` when a joining worker found its weights lost."""
        self._replacing = asyncio.Lock()

    @classmethod
    def from_config(
        cls,
        config: WeightsConfig,
        *,
        learner: PublishingLearner,
        num_workers: int,
        events: Events,
        around: Callable[[Transport], Transport] | None = None,
    ) -> Self:
        """Uses the transport named by `weights.transport`. `around` wraps it so that loads come in turns. Raises ConfigError for a
        transport that does not import."""
        make = resolve(config.transport, home=TRANSPORTS, field="weights.transport")
        transport: Transport = make(timeout_s=config.timeout_s)
        return cls(
            around(transport) if around else transport,
            learner=learner,
            num_workers=num_workers,
            events=events,
            waits_for_joins=around is None,
        )

    async def publish(self) -> BroadcastStats:
        """Publishes the learner's weights for workers that join. Calls no worker."""
        return self._note(await self._publish())

    async def begin_broadcast(self) -> BroadcastStats:
        """Publishes, and blocks joins until `finish_broadcast`. The learner may continue when this returns.

        With `waits_for_joins`, first waits for workers that the last broadcast overtook while they joined.
        """
        if self._waits_for_joins:
            await self._overtaken.none()
        self._is_sent.clear()
        try:
            return await self._publish()
        except BaseException:
            self._is_sent.set()
            raise

    async def finish_broadcast(self, fleet: WorkerFleet, published: BroadcastStats) -> BroadcastStats:
        """Loads on every living worker. Workers that fail serve nothing, and their replacement has begun when this returns.

        If the `published` weights are lost with a node, the learner publishes again, and all workers get its current version. Raises
        WeightsError if more than half of the living workers cannot prove the version.
        """
        num_lost = Counter[str]()
        try:
            while True:
                workers = {worker.name: worker for worker in fleet.workers()}
                sent = _blaming(
                    _counting_silent(workers, await self._transport.deliver(list(workers.values()))), num_lost
                )
                seconds = published.seconds + sent.seconds
                stats = self._note(replace(sent, seconds=seconds, publish_seconds=published.seconds))
                if not any(isinstance(error, LostError) for _, error in stats.failures):
                    break
                published = await self._publish()
        finally:
            self._is_sent.set()
        self._num_workers = len(workers) or self._num_workers
        for name, error in self._failures(stats):
            fleet.replace(workers[name], error)
        return stats

    async def join(self, worker: ActorHandle) -> None:
        """Loads on a worker that is not in the fleet yet, and again if a newer version was published meanwhile.

        A running broadcast does not include this worker, so this waits for its end. The next broadcast waits for the second load
        (`waits_for_joins`); otherwise a worker that loads for longer than a step would never join. No other task runs between the last
        check and the caller's adding the worker to the fleet, so no broadcast can miss it. Raises the worker's failure, or WeightsError if
        the version is at fault.
        """
        await self._is_published.wait()
        num_lost = Counter[str]()
        if await self._catch_up(worker, num_lost):
            return
        with self._overtaken.one():
            await self._replace_lost()
            while not await self._catch_up(worker, num_lost):
                await self._replace_lost()

    def stats(self) -> dict[str, float]:
        """Metrics of the last broadcast."""
        last = self._last
        if last is None:
            return {}
        sent_bytes = last.size_bytes * len(last.attestations) if last.sent_bytes is None else last.sent_bytes
        stats = {
            "time/publish_s": last.publish_seconds,
            "time/broadcast_s": last.seconds,
            "weights/size_bytes": float(last.size_bytes),
            "weights/sent_bytes": float(sent_bytes),
            "weights/bytes_per_s": sent_bytes / max(last.seconds, 1e-9),
            "weights/num_refused": float(self._num_refused),
        }
        if last.changed_share is not None:
            stats["weights/changed_share"] = last.changed_share
        if proofs := last.attestations:
            stats |= {
                "weights/canary_error": max(proof.canary_mean_error for proof in proofs),
                "weights/canary_max_error": max(proof.canary_max_error for proof in proofs),
                "weights/canary_tolerance": min(proof.tolerance for proof in proofs),
                "weights/noise_floor": max(proof.noise_floor for proof in proofs),
                "weights/num_indistinguishable": float(sum(not proof.distinguishable for proof in proofs)),
                "weights/pause_s": max(proof.pause_seconds for proof in proofs),
            }
        return stats

    async def _catch_up(self, worker: ActorHandle, num_lost: Counter[str]) -> bool:
        """Loads the version published last. False if it is lost, or if a broadcast began or a newer version was published meanwhile."""
        await self._is_sent.wait()
        published = self._last
        stats = _blaming(_counting_silent([worker.name], await self._transport.catch_up([worker])), num_lost)
        for _, error in self._failures(stats):
            if not isinstance(error, LostError):
                raise error
            self._lost = published
            return False
        for proof in stats.attestations:
            self._events.event(
                "attested",
                actor=proof.worker,
                policy_version=proof.policy_version,
                canary_mean_error=proof.canary_mean_error,
                noise_floor=proof.noise_floor,
                distinguishable=proof.distinguishable,
            )
        return stats.policy_version == self._version and self._is_sent.is_set()

    async def _replace_lost(self) -> None:
        """Publishes again if the published weights are lost, unless another worker or a broadcast has done so meanwhile."""
        async with self._replacing:
            await self._is_sent.wait()  # a running broadcast still needs its weights
            if self._lost is self._last:
                await self.publish()

    async def _publish(self) -> BroadcastStats:
        published = _counting_silent((), await self._transport.publish(self._learner))
        return replace(published, publish_seconds=published.seconds)

    def _note(self, stats: BroadcastStats) -> BroadcastStats:
        if stats.policy_version != self._version:
            self._proofs.clear()
        self._version = stats.policy_version
        self._last = stats
        self._is_published.set()
        return stats

    def _failures(self, stats: BroadcastStats) -> list[tuple[str, TreadwheelError]]:
        """The failures by worker. Raises WeightsError if the version is at fault and not single workers."""
        refused = {name: error for name, error in stats.failures if isinstance(error, WeightsError)}
        self._num_refused += len(refused)
        if stats.policy_version == self._version:
            self._proofs |= dict.fromkeys((proof.worker for proof in stats.attestations), None) | refused
        if error := verdict(self._proofs, num_workers=self._num_workers):
            raise error
        return [
            (name, WorkerError(f"{name} cannot serve: {error}", actor=name, stage="load") if name in refused else error)
            for name, error in stats.failures
        ]


def _counting_silent(workers: Iterable[str], stats: BroadcastStats) -> BroadcastStats:
    """Adds a failure for each worker of which the transport says nothing: it must not sample under unproven weights. Raises WeightsError
    for another answer than BroadcastStats."""
    answer: object = stats  # a transport may be a user's own
    if not isinstance(answer, BroadcastStats):
        raise WeightsError(f"the transport of weights.transport returned {answer!r}, not BroadcastStats; return those")
    told = {*(proof.worker for proof in stats.attestations), *(name for name, _ in stats.failures)}
    silent = tuple(
        (
            name,
            WorkerError(
                f"{name}: weights.transport returned neither its proof nor its failure", actor=name, stage="load"
            ),
        )
        for name in workers
        if name not in told
    )
    return replace(stats, failures=(*stats.failures, *silent)) if silent else stats


def _blaming(stats: BroadcastStats, num_lost: Counter[str]) -> BroadcastStats:
    """Makes the LostError of a worker that lost its weights too often its own failure, unless another actor is at fault."""
    lost = {name for name, error in stats.failures if isinstance(error, LostError) and error.actor in (None, name)}
    num_lost.update(lost)

    def blamed(name: str, error: TreadwheelError) -> TreadwheelError:
        if name not in lost or num_lost[name] <= _MOST_LOST:
            return error
        message = f"{name} did not get the weights, which were published {_MOST_LOST} times more: {error}"
        return WorkerError(message, actor=name, stage="load", details=error.details)

    return replace(stats, failures=tuple((name, blamed(name, error)) for name, error in stats.failures))


def verdict(proofs: Mapping[str, WeightsError | None], *, num_workers: int) -> WeightsError | None:
    """The error for a version that more than half of `num_workers` failed to prove: then no single machine is at fault. None otherwise.

    Failures of workers in addition to `num_workers`, and of their successors, do not count, since the version can be served without them.
    """
    refused = [error for error in proofs.values() if error is not None]
    num_missing = num_workers - (len(proofs) - len(refused))
    num_refused = min(len(refused), num_missing)
    if 2 * num_refused <= num_workers:
        return None
    return refused[0] if num_workers == 1 else WeightsError(f"{num_refused} of {num_workers} workers: {refused[0]}")
