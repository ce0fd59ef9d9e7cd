import json
import threading
from typing import Any
from unittest.mock import Mock

import pytest
from obstore.store import MemoryStore

from cluster.contracts.errors import DamagedError
from cluster.record.object_store import ObjectStore
from cluster.record.step_objects import StepObjects


def test_a_long_ledger_is_read_sixteen_records_at_a_time_and_comes_in_order(monkeypatch):
    store = ObjectStore("s3://memory/run", store=MemoryStore())
    records = StepObjects(store, file="ledger.jsonl")
    lines = [json.dumps({"step": step}) for step in range(1, 65)]
    for step, line in enumerate(lines, start=1):
        records.append_record(step, line)
    sixteen, read = threading.Barrier(16), store.read_tagged

    def read_beside_others(name: str):
        sixteen.wait(timeout=60)
        return read(name)

    monkeypatch.setattr(store, "read_tagged", read_beside_others)
    assert records.read_records(0) == lines


def test_a_record_that_was_copied_from_a_disk_is_one_line_whatever_characters_stand_in_it():
    """JSON leaves U+2028, U+2029 and U+0085 as they are, and Python's `splitlines` ends lines there."""
    lines = ['{"step": 1, "pass_rates": {"a\u2028b": 0.5}}', '{"step": 2, "pass_rates": {"c\x85": 1.0}}']
    store: Any = Mock(read_appended=lambda name: "".join(f"{line}\n" for line in lines))
    store.names.return_value, store.read_many.return_value = [], []
    assert StepObjects(store, file="ledger.jsonl").read_records(0) == lines
    assert StepObjects(store, file="ledger.jsonl").read_records(1) == lines[1:]


def test_so_many_records_are_kept_and_with_none_the_copied_file_goes_too():
    store = ObjectStore("s3://memory/run", store=MemoryStore())
    records = StepObjects(store, file="ledger.jsonl")
    store.write("ledger.jsonl", b'{"step": 1}\n')
    for step in (2, 3, 4):
        records.append_record(step, json.dumps({"step": step}))
    records.cut_records(3)
    assert [json.loads(line)["step"] for line in records.read_records(0)] == [1, 2, 3]
    records.cut_records(0)
    assert records.read_records(0) == []


@pytest.mark.parametrize("content", [b"", b'{"record": {', b"\xff", b"[]", b'{"driver": "a"}'])
def test_a_record_that_is_damaged_is_named(content):
    """Seen before: its reader ended with an error of Python's, and an empty one was passed over."""
    store: Any = Mock(read_appended=lambda name: "", path=lambda name: f"s3://bucket/run/{name}")
    store.names.return_value, store.read_many.return_value = ["000001.json"], [content]
    with pytest.raises(DamagedError, match=r"s3://bucket/run/ledger/000001\.json is damaged: .*; bring it back"):
        StepObjects(store, file="ledger.jsonl").read_records(0)
