"""One driver per run directory of an object store, whatever the clocks of the machines say."""

import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from obstore.store import MemoryStore

from cluster.contracts.errors import ClaimLostError, ConfigError, InUseError, StorageError
from cluster.record import store_claim
from cluster.record.object_store import ObjectStore
from cluster.record.store_claim import CLOCK, StoreClaim, owner_by_this_clock, owner_of

NAME = "driver.lock"


class ClockedStore(ObjectStore):
    """A store whose clock is set by hand. It is years behind this machine's."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__("s3://memory/run", store=store)
        self.time = datetime(2001, 1, 1, tzinfo=UTC)
        self.written: dict[str, datetime] = {}

    def write(self, name, content):
        super().write(name, content)
        self.written[name] = self.time

    def write_if(self, name, content, tag):
        if new := super().write_if(name, content, tag):
            self.written[name] = self.time
        return new

    def modified_at(self, name):
        return self.written[name]

    def pass_time(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)


@pytest.fixture
def store() -> ClockedStore:
    return ClockedStore(MemoryStore())


@pytest.fixture
def claim(store):
    claim = StoreClaim(store, NAME)
    yield claim
    claim._is_over.set()


def test_a_living_driver_keeps_others_out_and_is_named(store, claim):
    store.pass_time(89)
    with pytest.raises(
        InUseError,
        match=r"run_dir='s3://memory/run' is in use by process \d+ on .*; wait for it \(--wait-for-claim 10m\)",
    ):
        StoreClaim(store, NAME)
    assert owner_of(store, NAME).startswith("process ")


def test_a_dead_drivers_claim_lapses_after_90_s_of_the_stores_clock(store, claim):
    store.pass_time(91)
    assert owner_of(store, NAME) is None
    StoreClaim(store, NAME).release()


def test_a_claim_that_is_renewed_does_not_lapse(store, claim):
    contents = set[bytes]()
    for _ in range(5):
        store.pass_time(60)
        claim.renew()
        contents.add(store.read(NAME).to_pybytes())
    with pytest.raises(InUseError):
        StoreClaim(store, NAME)
    assert len(contents) == 5, "a store that makes versions of contents tells a renewal from what was there"


def test_a_thread_renews_the_claim_until_it_is_released(store, monkeypatch):
    monkeypatch.setattr(store_claim, "RENEW_S", 0.001)
    is_renewed, goes_on, write_if = threading.Event(), threading.Event(), store.write_if

    def noted(*given):
        if threading.current_thread() is not threading.main_thread():
            is_renewed.set()
            assert goes_on.wait(60)
            time.sleep(0.05)
        return write_if(*given)

    monkeypatch.setattr(store, "write_if", noted)
    claim = StoreClaim(store, NAME)
    assert is_renewed.wait(60)
    goes_on.set()
    claim.release()
    assert not claim._thread.is_alive() and owner_of(store, NAME) is None


def test_a_driver_that_was_taken_for_dead_hears_who_took_over(store, claim):
    store.pass_time(91)
    other = StoreClaim(store, NAME)
    claim.check()
    claim.renew()
    with pytest.raises(
        ClaimLostError, match=r"run_dir='s3://memory/run' was taken over by process \d+ on .*; this one ends"
    ):
        claim.check()
    claim.release()
    assert owner_of(store, NAME) is not None  # the other's, which the release left alone
    other.check()
    other.release()


def test_a_released_directory_is_free_at_once(store):
    assert owner_of(store, NAME) is None and owner_by_this_clock(store, NAME) is None
    StoreClaim(store, NAME).release()
    assert owner_of(store, NAME) is None and store.names("") == [NAME]
    StoreClaim(store, NAME).release()


def test_of_two_who_find_it_free_at_once_one_wins(store, monkeypatch):
    first = []
    write_if = store.write_if

    def beaten(name, content, tag):
        monkeypatch.setattr(store, "write_if", write_if)
        first.append(StoreClaim(store, NAME))
        return write_if(name, content, tag)

    monkeypatch.setattr(store, "write_if", beaten)
    with pytest.raises(InUseError, match="in use by process"):
        StoreClaim(store, NAME)
    first[0].check()
    first[0].release()


def test_a_store_that_is_away_for_a_while_does_not_lose_the_claim(store, claim, monkeypatch):
    def refuse(name, content, tag):
        raise StorageError("busy")

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_if", refuse)
        claim.renew()
    claim.check()
    claim.renew()
    claim.check()


def test_who_may_not_write_sees_the_owner_by_this_machines_clock(store, claim, monkeypatch):
    def refuse(name, content):
        raise StorageError("AccessDenied")

    store.time = datetime.now(UTC)
    claim.renew()
    assert owner_by_this_clock(store, NAME) is not None and not store.has(CLOCK)
    monkeypatch.setattr(store, "write", refuse)
    assert owner_of(store, NAME).startswith("process ") and not store.has(CLOCK)
    assert owner_by_this_clock(store, NAME) == owner_of(store, NAME)
    store.written[NAME] -= timedelta(seconds=91)
    assert owner_of(store, NAME) is None and owner_by_this_clock(store, NAME) is None
    with pytest.raises(StorageError, match="AccessDenied"):
        StoreClaim(store, NAME)


def test_a_store_that_writes_over_what_is_to_be_created_is_refused(store, monkeypatch):
    def overwrite(name, content, tag):
        store.write(name, content)
        return {"e_tag": content.decode()}

    monkeypatch.setattr(store, "write_if", overwrite)
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"^s3://memory/run: this store has no conditional writes, .* two drivers"
        ):
            StoreClaim(store, NAME)


@pytest.mark.parametrize("content", [b"", b"process 4711 on node-1", b"4711", b'"a"', b"\xff"])
def test_the_lock_of_a_local_run_that_was_copied_is_nobodys(store, content):
    store.write(NAME, content)
    assert owner_of(store, NAME) is None
    claim = StoreClaim(store, NAME)
    assert owner_of(store, NAME).startswith("process ") and not claim.lapsed
    claim.release()


@pytest.fixture
def unanswered(store, claim, monkeypatch):
    """A renewal that the store took, and whose answer was lost for longer than one asks again."""
    write_if = store.write_if

    def lost(name, content, tag):
        write_if(name, content, tag)
        raise StorageError("does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_if", lost)
        claim.renew()


def test_a_renewal_whose_answer_was_lost_is_no_other_driver(store, claim, unanswered):
    store.pass_time(60)
    claim.renew()
    claim.check()
    store.pass_time(60)
    assert owner_of(store, NAME) is not None


def test_a_release_after_a_renewal_whose_answer_was_lost_frees_the_directory(store, claim, unanswered):
    claim.release()
    assert owner_of(store, NAME) is None
