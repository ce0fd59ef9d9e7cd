"""The ledger's records in an object store. Only one driver can create ledger/000042.json. That is the fence.

Each names the driver that wrote it, so that a driver whose answer was lost recognizes its own record, even if two drivers record the same.
"""

import json
import re
from typing import Any

from cluster.contracts.errors import AlreadyExistsError, DamagedError, LedgerError
from cluster.record.lock import this_driver
from cluster.record.object_store import ObjectStore

_FOLDER = "ledger"


class StepObjects:
    """Records by step. The first ones may be in a ledger file that came with a copy of a local run."""

    def __init__(self, store: ObjectStore, *, file: str) -> None:
        self._store = store
        self._file = file
        self._driver = this_driver()

    def append_record(self, step: int, line: str) -> None:
        content = json.dumps({"record": json.loads(line), "driver": self._driver})
        try:
            self._store.create(_name(step), content.encode())
        except AlreadyExistsError:
            other = self._entry(_name(step), self._store.read(_name(step)).to_pybytes())["driver"]
            raise LedgerError(
                f"step {step} of run_dir={self._store.url!r} was recorded by {other}: another driver runs there, and this one ends. "
                "Its step was not learned; nothing is lost or doubled"
            ) from None

    def read_records(self, after: int) -> list[str]:
        # Not `splitlines`, which ends a line at characters that JSON leaves as they are.
        copied = self._store.read_appended(self._file).split("\n")[:-1]
        names = [_name(step) for step in self._steps() if step > max(after, len(copied))]
        found = zip(names, self._store.read_many(names), strict=True)
        entries = (self._entry(name, content) for name, content in found if content is not None)
        return [*copied[after:], *(json.dumps(entry["record"]) for entry in entries)]

    def cut_records(self, number: int) -> None:
        self._store.delete([_name(step) for step in self._steps() if step > number])
        if number == 0:
            self._store.remove(self._file)

    def _entry(self, name: str, content: bytes) -> dict[str, Any]:
        """An object's record and driver. Raises DamagedError for one that holds neither."""
        try:
            entry = json.loads(content)
            return {"record": entry["record"], "driver": entry["driver"]}
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(
                f"{self._store.path(name)} is damaged: it holds no record of a step; bring it back from a copy"
            ) from error

    def _steps(self) -> list[int]:
        found = (re.fullmatch(r"(\d{6,})\.json", name) for name in self._store.names(_FOLDER))
        return sorted(int(each[1]) for each in found if each)


def _name(step: int) -> str:
    return f"{_FOLDER}/{step:06d}.json"
