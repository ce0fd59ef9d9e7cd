"""Two drivers on one run directory of an object store: one records a step, the other ends, and nothing is lost or doubled."""

import json

import pytest
import yaml

from cluster.contracts.errors import ClaimLostError, ConfigError, InUseError, LedgerError, StorageError
from cluster.contracts.schema import to_batch
from cluster.record import store_claim
from cluster.record.ledger import Ledger
from cluster.record.recorder import Recorder, learned_of
from cluster.record.run_directory import EVENTS, METRICS, RUN_YAML, RunDirectory
from tests.object_store import quick_requests, s3
from tests.store_proxy import KINDS
from tests.unit.cluster.contracts.rows import row

CONFIG = yaml.safe_dump({"seed": 1})


@pytest.fixture(scope="module")
def proxy():
    with s3("bucket") as proxy:
        yield proxy


@pytest.fixture
def url(proxy, request, monkeypatch):
    quick_requests(monkeypatch)
    proxy.made.clear()
    yield f"s3://bucket/{request.node.name}"
    proxy.fault = lambda method, path, number: None


def record(ledger, *groups):
    return ledger.append(groups=groups, trajectories="file", trajectories_digest="digest")


def test_of_two_drivers_that_record_the_same_step_one_wins(url):
    one, two = Ledger(RunDirectory(url)), Ledger(RunDirectory(url))
    record(one, 0, 1)
    with pytest.raises(
        LedgerError, match=r"^step 1 of run_dir='s3://.*' was recorded by process \d+ on .*: another driver runs there"
    ):
        record(two, 0, 1)
    record(one, 2, 3)
    assert [each.groups for each in Ledger(RunDirectory(url)).records()] == [(0, 1), (2, 3)]


def test_a_driver_that_wakes_leaves_the_trajectories_that_the_next_one_recorded(url):
    woken, next_one = RunDirectory(url), RunDirectory(url)
    late, ledger = Ledger(woken), Ledger(next_one)
    _, (name, digest) = Recorder(next_one).record(1, to_batch([row(ticket_index=4)]))
    ledger.append(groups=[4], trajectories=name, trajectories_digest=digest)
    _, (name, digest) = Recorder(woken, keep_steps=1).record(1, to_batch([row(ticket_index=7)]))
    with pytest.raises(LedgerError, match="another driver runs there"):
        late.append(groups=[7], trajectories=name, trajectories_digest=digest)
    (record,) = Ledger(RunDirectory(url)).records()
    (group,) = Recorder(next_one).read(record.trajectories, record.trajectories_digest)
    assert group["ticket_index"].to_pylist() == [4]
    next_one.write_file("checkpoints/step-000001/manifest.json", b"{}")
    Recorder(next_one, keep_steps=1).record(2, to_batch([row()]))
    assert [name[:11] for name in next_one.names("trajectories")] == ["pruned.json", "step-000002"]


def test_a_driver_that_wakes_leaves_the_record_of_learning_of_the_next_one(url):
    versions: dict[str, int] = {}
    for version in (4, 7):  # one recorder of each driver, which were given different groups
        recorder = Recorder(RunDirectory(url))
        _, (name, _) = recorder.record(1, to_batch([row(ticket_index=version)]))
        recorder.record_learned(name, version)
        versions[name] = version
    found = {name: learned_of(RunDirectory(url), name) for name in versions}
    assert {name: learned and learned.policy_version for name, learned in found.items()} == versions


def test_a_ledger_among_faults_is_the_one_without_them(url, proxy):
    proxy.fault = lambda method, path, number: KINDS[number // 2 % len(KINDS)] if number % 2 else None
    ledger = Ledger(RunDirectory(url))
    for step in range(20):
        record(ledger, 2 * step, 2 * step + 1)
    proxy.fault = lambda method, path, number: None
    found = Ledger(RunDirectory(url))
    assert [each.groups for each in found.records()] == [(2 * step, 2 * step + 1) for step in range(20)]
    assert set(proxy.made) == set(KINDS) and found.num_torn_lines == 0
    assert [each.step for each in found.after(17)] == [18, 19, 20]


def test_an_altered_record_and_a_missing_one_are_found(url):
    directory = RunDirectory(url)
    ledger = Ledger(directory)
    for step in range(3):
        record(ledger, step)
    whole = directory.read_text("ledger/000001.json")
    entry = json.loads(whole)
    entry["record"]["trajectories_digest"] = "another"
    directory.write_json("ledger/000001.json", entry)
    with pytest.raises(LedgerError, match="line 2: the record before it was altered"):
        Ledger(directory)
    directory.write_file("ledger/000001.json", whole.encode())
    directory.remove("ledger/000002.json")
    with pytest.raises(LedgerError, match="step 3 does not follow step 1"):
        Ledger(directory)


def test_a_local_run_that_was_copied_to_a_store_goes_on_there(url, tmp_path):
    local = RunDirectory(str(tmp_path))
    local.claim(CONFIG)
    record(Ledger(local), 0, 1)
    directory = RunDirectory(url)
    for name in (RUN_YAML, "driver.lock", "ledger/ledger.jsonl"):
        directory.upload(name, local.path(name))
    local.release()
    assert directory.owner() is None
    directory.claim(CONFIG)
    record(Ledger(directory), 2, 3)
    directory.release()
    assert [each.groups for each in Ledger(RunDirectory(url)).records()] == [(0, 1), (2, 3)]


def test_a_driver_that_stood_still_for_longer_than_a_request_may_take_hears_who_took_over(url, proxy):
    woken, next_one = RunDirectory(url), RunDirectory(url)
    woken.claim(CONFIG)
    ledger = Ledger(woken)
    proxy.pass_time(store_claim.LEASE_S + 1)
    next_one.claim(CONFIG)
    proxy.fault = lambda method, path, number: "403:AccessDenied" if "ledger/" in path else None
    with pytest.raises(ClaimLostError, match="was taken over by process"):
        record(ledger, 0)
    proxy.fault = lambda method, path, number: None
    with pytest.raises(ClaimLostError):
        record(ledger, 0)
    assert Ledger(next_one).version == 0, "once it has heard, it records nothing, though it could"
    for _ in range(2):
        woken.append_json(EVENTS, {"kind": "failed"})
        woken.flush_lines()
    woken.release()
    assert next_one.names("events") == ["000001.jsonl", "000002.jsonl"], "it merges nothing of the other's"
    next_one.release()


def test_a_claim_that_the_store_takes_twice_lapses_no_earlier(url, proxy):
    """Seen before: the proxy of these tests took it for as old as what was there, and a driver that was to wait did not."""
    proxy.pass_time(store_claim.LEASE_S + 1)
    proxy.fault = lambda method, path, number: "twice" if method == "PUT" else None
    directory = RunDirectory(url)
    directory.claim(CONFIG)
    assert RunDirectory(url).owner() is not None
    directory.release()


def test_a_run_directory_in_a_store_has_one_owner_and_one_run(url):
    directory, other = RunDirectory(url), RunDirectory(url)
    directory.claim(CONFIG)
    with pytest.raises(InUseError, match="is in use by process"):
        other.check(CONFIG)
    record(Ledger(directory), 0)
    directory.append_json(EVENTS, {"kind": "stopped", "time": 1.0})
    directory.append_json(METRICS, {"policy_version": 1, "time": 1.0})
    directory.release()
    assert other.owner() is None
    other.claim(CONFIG)
    other.append_json(EVENTS, {"kind": "launched", "time": 2.0})
    other.release()
    assert [each["kind"] for each in directory.read_json_lines(EVENTS)] == ["stopped", "launched"]
    assert directory.names("events") == ["000001-000002.jsonl"]
    assert other.exists(RUN_YAML) and not other.is_claimed


def test_a_run_that_never_finished_a_step_starts_again_in_a_store(url):
    directory = RunDirectory(url)
    directory.claim(CONFIG)
    record(Ledger(directory), 0)
    directory.append_json(METRICS, {"policy_version": 0})
    directory.release()
    directory.claim(yaml.safe_dump({"seed": 2}))
    assert Ledger(directory).version == 0 and directory.read_lines(METRICS) == []
    directory.release()


def test_another_run_does_not_begin_where_the_driver_of_one_may_wake(url, monkeypatch):
    woken, other = RunDirectory(url), yaml.safe_dump({"seed": 2})
    woken.claim(CONFIG)
    record(Ledger(woken), 0)
    monkeypatch.setattr(store_claim, "LEASE_S", -1.0)  # all are taken for dead
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"process \d+ on .* never gave the directory back: should it wake"):
            RunDirectory(url).claim(other)
    directory = RunDirectory(url)
    directory.claim(CONFIG)
    assert Ledger(directory).version == 1
    directory.release()
    woken.release()
    directory.remove("driver.lock")
    directory.claim(other)
    assert Ledger(directory).version == 0
    directory.release()


def test_a_check_leaves_nothing_in_a_store(url):
    RunDirectory(url).check(CONFIG)
    assert RunDirectory(url).names() == []


def test_a_bucket_that_does_not_exist_is_said_before_anything_starts(url):
    for attempt in (RunDirectory("s3://buckett/run").check, RunDirectory("s3://buckett/run").claim):
        with pytest.raises(StorageError, match=r"s3://buckett/run: The specified bucket does not exist"):
            attempt(CONFIG)
