"""A worker is believed only if it proves the published version, and has the base of a delta only if it proved that one last."""

import time
from typing import Any

import pytest

from cluster.contracts.errors import WeightsError, WorkerError
from cluster.contracts.types import Attestation
from cluster.weights.delivery import Bases, proof_of, stats_of
from tests.fakes import attestation

PUBLISHED = {"policy_version": 7, "digest": "d", "total_bytes": 8}


class Worker:
    name = "w0"

    def __init__(self, version: int, digest: str) -> None:
        self._proof = attestation(self.name, version, digest=digest)

    async def call(self, method: str, *args: Any, deadline_s: float) -> Attestation:
        assert (method, args, deadline_s) == ("load", ("manifest",), 5.0)
        return self._proof


@pytest.mark.parametrize(("version", "digest", "is_believed"), [(7, "d", True), (6, "d", False), (7, "e", False)])
async def test_a_proof_is_of_the_published_version_and_of_its_bytes(version, digest, is_believed):
    proof = await proof_of(Worker(version, digest), "load", "manifest", published=PUBLISHED, deadline_s=5.0)
    assert isinstance(proof, Attestation if is_believed else WeightsError)


@pytest.mark.parametrize(("version", "digest", "has_it"), [(7, "d", True), (6, "d", False), (7, "e", False)])
def test_a_worker_has_the_base_of_a_delta_if_it_proved_that_version_with_these_bytes(version, digest, has_it):
    bases, worker = Bases(), Worker(version, digest)
    bases.note(worker, attestation("w0", version, digest=digest))
    assert bases.has(worker, {"base_version": 7, "base_digest": "d"}) is has_it
    assert not bases.has(worker, None)


def test_a_delivery_is_timed_and_counts_the_bytes_of_those_that_proved_it(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 12.5)
    workers = [Worker(7, "d"), Worker(7, "d")]
    results = [attestation("w0", 7, digest="d"), WorkerError("gone")]
    stats = stats_of(PUBLISHED, workers, results, started=10.0, sizes=[3, 8])
    assert (stats.seconds, stats.sent_bytes, stats.size_bytes) == (2.5, 3, 8)
