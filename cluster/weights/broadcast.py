"""Brings the learner's weights to every worker, and to each one that comes later. No worker samples under weights unproven.

The transport moves the bytes and asks for the proofs; `Weights` decides which worker gets them when, and what a failed proof means.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Self

from cluster.contracts.config import WeightsConfig
from cluster.contracts.errors import LostError, TreadwheelError, WeightsError, WorkerError
from cluster.contracts.plugins import TRANSPORTS, resolve
from cluster.contracts.protocols import ActorHandle, Events, PublishingLearner, Transport, WorkerFleet
from cluster.contracts.types import BroadcastStats

_MOST_LOST = 3
"""How often weights that are lost to one worker are published again, in one broadcast or while it joins. Then the worker has failed."""


class Weights:
    """The published version, and which workers serve it."""

    def __init__(
        self,
        transport: Transport,
        *,
        learner: PublishingLearner,
        num_workers: int,
        events: Events,
        waits_for_joins: bool = True,
    ) -> None:
        """`num_workers` is how many will join before the first broadcast. Without `waits_for_joins` no broadcast waits for a worker that
        joins: its load waits in turn for the engines' turn, which the broadcast brings."""
        self._waits_for_joins = waits_for_joins
        self._transport = transport
        self._learner = learner
        self._events = events
        self._num_workers = num_workers
        """Workers that the last broadcast went to, or that will join before the first."""
        self._version = -1
        self._proofs: dict[str, WeightsError | None] = {}
        """By worker: why its last proof of the version failed; None when it proved it."""
        self._num_refused = 0
        self._is_published = asyncio.Event()
        self._is_sent = asyncio.Event()
        self._is_sent.set()
        self._num_overtaken = 0
        """Workers that load again because a broadcast overtook their first load. The next broadcast waits for them."""
        self._none_overtaken = asyncio.Event()
        self._none_overtaken.set()
        self._last: BroadcastStats | None = None
        self._lost: BroadcastStats | None = None
        """What `_last` was when a worker that joined could not have its weights any more."""
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
        """Through the transport that `weights.transport` names, or what is made `around` it, whose loads come in turns. Raises ConfigError
        for one that does not import."""
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
        """Takes the learner's weights to where workers that join can fetch them; asks no worker."""
        return self._note(await self._publish())

    async def begin_broadcast(self) -> BroadcastStats:
        """Publishes, and keeps workers from joining until `finish_broadcast`. The learner may learn on when this returns.

        Waits first for workers that the last broadcast overtook while they joined, unless they wait for this one.
        """
        if self._waits_for_joins:
            await self._none_overtaken.wait()
        self._is_sent.clear()
        try:
            return await self._publish()
        except BaseException:
            self._is_sent.set()
            raise

    async def finish_broadcast(self, fleet: WorkerFleet, published: BroadcastStats) -> BroadcastStats:
        """Loads on every living worker. Those that fail are being replaced when this returns, and serve nothing.

        Where what was `published` goes with a node, the learner publishes again: all get the version that it has by then. Raises
        WeightsError when more than half of the living workers cannot prove the version.
        """
        num_lost = Counter[str]()
        try:
            while True:
                workers = {worker.name: worker for worker in fleet.workers()}
                sent = _blaming(await self._transport.deliver(list(workers.values())), num_lost)
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
        """Loads on a worker that is not in the fleet yet: a second time if a newer version was published meanwhile.

        A broadcast under way does not know of this worker, so it waits for its end. The next broadcast waits for the second load
        (`waits_for_joins`): a worker whose load takes longer than a step would never join otherwise. Between the last check and the
        worker's joining nothing else runs: no broadcast can miss it. Raises the worker's failure, or WeightsError when it is not the
        worker's.
        """
        await self._is_published.wait()
        num_lost = Counter[str]()
        if await self._catch_up(worker, num_lost):
            return
        with self._holding_broadcasts():
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
        """Loads what was published last. False when it was published over meanwhile, or is lost."""
        await self._is_sent.wait()
        published = self._last
        stats = _blaming(await self._transport.catch_up([worker]), num_lost)
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
        """Publishes anew what went with its node, unless another worker or a broadcast did it meanwhile."""
        async with self._replacing:
            await self._is_sent.wait()  # the weights that a broadcast brings must stay until it is over
            if self._lost is not None and self._lost is self._last:
                await self.publish()

    async def _publish(self) -> BroadcastStats:
        published = await self._transport.publish(self._learner)
        return replace(published, publish_seconds=published.seconds)

    @contextlib.contextmanager
    def _holding_broadcasts(self) -> Iterator[None]:
        """No broadcast begins while this is open. Several workers may hold it open at a time."""
        self._num_overtaken += 1
        self._none_overtaken.clear()
        try:
            yield
        finally:
            self._num_overtaken -= 1
            if not self._num_overtaken:
                self._none_overtaken.set()

    def _note(self, stats: BroadcastStats) -> BroadcastStats:
        if stats.policy_version != self._version:
            self._proofs.clear()
        self._version = stats.policy_version
        self._last = stats
        self._is_published.set()
        return stats

    def _failures(self, stats: BroadcastStats) -> list[tuple[str, TreadwheelError]]:
        """The failures, each as its worker's own. Raises WeightsError when the fault is the version's."""
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


def _blaming(stats: BroadcastStats, num_lost: Counter[str]) -> BroadcastStats:
    """Workers to which weights were lost too often have failed, but for what was another actor's fault. `num_lost` counts, by worker."""
    lost = {name for name, error in stats.failures if isinstance(error, LostError) and error.actor in (None, name)}
    num_lost.update(lost)

    def blamed(name: str, error: TreadwheelError) -> TreadwheelError:
        if name not in lost or num_lost[name] <= _MOST_LOST:
            return error
        what = f"{name} did not get the weights, which were published {_MOST_LOST} times more: {error}"
        return WorkerError(what, actor=name, stage="load", details=error.details)

    return replace(stats, failures=tuple((name, blamed(name, error)) for name, error in stats.failures))


def verdict(proofs: Mapping[str, WeightsError | None], *, num_workers: int) -> WeightsError | None:
    """Why no worker may serve a version: when more than half of `num_workers` failed to prove it, no single machine is to blame.

    A worker beyond them that fails, and its successors, are no part of the half: the version serves without them.
    """
    refused = [error for error in proofs.values() if error is not None]
    num_missing = num_workers - (len(proofs) - len(refused))
    num_refused = min(len(refused), num_missing)
    if 2 * num_refused <= num_workers:
        return None
    return refused[0] if num_workers == 1 else WeightsError(f"{num_refused} of {num_workers} workers: {refused[0]}")
