"""One driver per run directory of an object store. The claim is an object that its owner renews, and that lapses otherwise.

It decides which driver may begin, and tells an owner that was taken for dead to end. The ledger keeps two drivers from recording one step.
Ages are by the store's clock, because clocks of machines may differ.
"""

import json
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

from cluster.contracts.errors import ClaimLostError, ConfigError, StorageError
from cluster.record.lock import in_use, this_driver
from cluster.record.object_store import ObjectStore, Tag

RENEW_S = 20.0
LEASE_S = 90.0
CLOCK = "driver.clock"


class StoreClaim:
    """The claim. It is ours until `release`, or until it has lapsed and another driver has taken it."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        """Raises InUseError naming the living owner, ConfigError if the store has no conditional writes."""
        self._store, self._name = store, name
        self._driver = this_driver()
        self._num_renewals = 0
        found = store.read_tagged(name)
        before = _entry(found)
        owner: str = before.get("owner", "")
        if owner and _is_living(store, name, now=_clock(store)):
            raise in_use(store.url, owner)
        self.lapsed: str = owner or before.get("lapsed", "")
        """The last driver here that was taken for dead; empty when all gave the claim back."""
        tag = store.write_if(name, self._content(), found[1] if found else None)
        if tag is None:
            raise in_use(store.url, _entry(store.read_tagged(name)).get("owner") or "another process")
        if store.write_if(name, self._released(), None) is not None:
            raise ConfigError(
                f"{store.url}: this store has no conditional writes, it wrote over an object in spite of If-None-Match: two drivers could "
                "record one step there; use a store or a release of its server that has them, or a run_dir on a disk"
            )
        self._tag: Tag = tag
        self._lost = ""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_released, name="claim", daemon=True)
        self._thread.start()

    @property
    def is_lost(self) -> bool:
        return bool(self._lost)

    def check(self) -> None:
        """Raises ClaimLostError once another driver has taken the directory."""
        if self._lost:
            raise ClaimLostError(
                f"run_dir={self._store.url!r} was taken over by {self._lost}, after {LEASE_S:g} s without a sign of this driver; "
                "this one ends, and the other goes on"
            )

    def renew(self) -> None:
        """Begins the lease anew. Does nothing if the store does not answer, until the next call."""
        try:
            self._write(self._content())
        except StorageError:
            return

    def release(self) -> None:
        """Raises StorageError if the store does not answer; the lease then lapses."""
        self._is_over.set()
        self._thread.join()
        if not self._lost:
            self._write(self._released())

    def _renew_until_released(self) -> None:
        while not self._lost and not self._is_over.wait(RENEW_S):
            self.renew()

    def _write(self, content: bytes) -> None:
        for _ in range(2):
            if tag := self._store.write_if(self._name, content, self._tag):
                self._tag = tag
                return
            found = self._store.read_tagged(self._name)
            owner = _entry(found).get("owner")
            if found is None or owner != self._driver:
                self._lost = owner or "another driver"
                return
            self._tag = found[1]  # of an earlier write of ours whose answer was lost

    def _content(self) -> bytes:
        """Different each time, because a store derives the version from the content."""
        self._num_renewals += 1
        return json.dumps({"owner": self._driver, "renewals": self._num_renewals, "lapsed": self.lapsed}).encode()

    def _released(self) -> bytes:
        return json.dumps({"owner": "", "was": self._driver, "lapsed": self.lapsed}).encode()


def owner_of(store: ObjectStore, name: str) -> str | None:
    """The living owner; None when there is none. By this machine's clock if this process may not write, and so cannot read the store's."""
    if not (owner := _entry(store.read_tagged(name)).get("owner")):
        return None
    try:
        now = _clock(store)
    except StorageError:
        now = datetime.now(UTC)
    return owner if _is_living(store, name, now=now) else None


def owner_by_this_clock(store: ObjectStore, name: str) -> str | None:
    """As `owner_of`, but without a write, by this machine's clock."""
    owner = _entry(store.read_tagged(name)).get("owner")
    return owner if owner and _is_living(store, name, now=datetime.now(UTC)) else None


def _clock(store: ObjectStore) -> datetime:
    """The store's time: that of an object which was just written."""
    store.write(CLOCK, b"")
    return store.modified_at(CLOCK)


def _is_living(store: ObjectStore, name: str, *, now: datetime) -> bool:
    return now - store.modified_at(name) <= timedelta(seconds=LEASE_S)


def _entry(found: tuple[bytes, Tag] | None) -> dict[str, Any]:
    """The claim's content. Empty also for the lock of a local run, which came with its copy and says nothing about drivers here."""
    try:
        entry = json.loads(found[0]) if found else None
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}
