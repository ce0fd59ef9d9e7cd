"""The driver side that all transports share: asks a worker to load and prove a version, and summarises a broadcast."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from cluster.contracts.errors import DeadlineError, TreadwheelError, WeightsError
from cluster.contracts.protocols import ActorHandle
from cluster.contracts.types import Attestation, BroadcastStats

Result = Attestation | TreadwheelError
"""One worker's proof, or its error."""
Published = Mapping[str, Any]
"""A version's `policy_version`, `digest`, `total_bytes` and, if there is one, `delta`, from its manifest; empty before the first one."""


async def fetched(object_ref: Any, *, within_s: float, before: Published) -> Any:
    """The value of the learner's object ref. Raises DeadlineError, which names the version published `before`, if it comes too late."""
    try:
        async with asyncio.timeout(within_s):
            return await object_ref
    except TimeoutError as error:
        raise DeadlineError(
            f"driver, fetching the manifest of the learner's weights: not there after {within_s:g} s (weights.timeout_s); "
            f"last published policy version: {before.get('policy_version', 'none')}"
        ) from error


async def proof_of(worker: ActorHandle, method: str, *args: Any, published: Published, deadline_s: float) -> Result:
    """Lets the worker load by `method`. Returns its proof, or an error: its failure, or a WeightsError for a proof of other weights."""
    try:
        proof: Attestation = await worker.call(method, *args, deadline_s=deadline_s)
    except TreadwheelError as error:
        return error
    if (proof.policy_version, proof.digest) == (published["policy_version"], published["digest"]):
        return proof
    return WeightsError(
        f"{worker.name} attests policy version {proof.policy_version} (digest {proof.digest[:16]}…), but version "
        f"{published['policy_version']} (digest {published['digest'][:16]}…) was published"
    )


class Bases:
    """The version that each worker proved last, to know whether it has the base of a delta. A new process of the same name has none."""

    def __init__(self) -> None:
        self._proved: WeakKeyDictionary[ActorHandle, tuple[int, str]] = WeakKeyDictionary()

    def note(self, worker: ActorHandle, result: Result) -> None:
        """Records the result of a load. Call it after each one."""
        self._proved.pop(worker, None)
        if isinstance(result, Attestation):
            self._proved[worker] = result.policy_version, result.digest

    def has(self, worker: ActorHandle, delta: Mapping[str, Any] | None) -> bool:
        """Whether the worker has the delta's base; False without a delta."""
        return delta is not None and self._proved.get(worker) == (delta["base_version"], delta["base_digest"])


def stats_of(
    published: Published,
    workers: Sequence[ActorHandle],
    results: Sequence[Result],
    *,
    started: float,
    sizes: Sequence[int] | None = None,
) -> BroadcastStats:
    """Statistics of a delivery that `started` (monotonic clock) and ends now. `results` are in the workers' order, and so are `sizes`, the
    bytes sent to each; None: the whole weights to each."""
    each = list(zip(workers, results, strict=True))
    sent = zip(sizes or [published["total_bytes"] for _ in each], results, strict=True)
    delta = published.get("delta")
    return BroadcastStats(
        policy_version=published["policy_version"],
        digest=published["digest"],
        size_bytes=published["total_bytes"],
        sent_bytes=sum(size for size, result in sent if isinstance(result, Attestation)),
        changed_share=delta["changed_share"] if delta else None,
        seconds=time.monotonic() - started,
        attestations=tuple(result for _, result in each if isinstance(result, Attestation)),
        failures=tuple((worker.name, result) for worker, result in each if not isinstance(result, Attestation)),
    )
