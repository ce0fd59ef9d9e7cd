"""Checkpoints in an object store: moto behind a proxy that makes faults."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster.contracts.errors import CheckpointError
from cluster.record.storage import Storage
from learner.checkpoint.manifest import FileEntry, Manifest, state_name
from learner.checkpoint.places import Place
from learner.checkpoint.reading import checkpoints, read_manifest, verify
from learner.checkpoint.states import States
from learner.checkpoint.targets import StoreTarget
from learner.checkpoint.writing import saving, write_tensors
from tests.object_store import quick_requests, s3
from tests.store_proxy import Proxy, seeded

ROOT = "s3://checkpoints-test"


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with s3("checkpoints-test") as proxy:
        yield proxy


@pytest.fixture
def store(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    quick_requests(monkeypatch)
    yield server
    server.fault = lambda method, path, number: None
    Storage(ROOT).remove_folder("run")


def _manifest(version: int, metric: float | None = None) -> Manifest:
    return Manifest(
        policy_version=version,
        num_ranks=2,
        parameters_digest="p",
        metric=metric,
        rated_by="" if metric is None else "accuracy",
        learner={},
        extra={} if metric is None else {"metric": metric},
        files={},
    )


def _save(step: int, *, version: int | None = None, metric: float | None = None, keep_last: int = 2) -> Place:
    """Two ranks' files, and the first rank's act."""
    url = f"{ROOT}/run/step-{step:06d}"
    manifest = _manifest(version or step, metric)
    save_id = uuid.uuid4().hex[:12]
    ranks = [StoreTarget(url, is_first=rank == 0, save_id=save_id) for rank in range(2)]
    try:
        with saving(url):
            wanted = [rank.begin(manifest) for rank in ranks]
            files = {}
            for number, rank in enumerate(ranks):
                name = state_name(number, 2)
                files[name] = write_tensors(
                    rank.folder() / name, {"w": torch.full((2,), float(step)) + number}, in_blocks=True
                )
                rank.deliver([name])
            if all(wanted):
                ranks[0].commit(manifest.sealed(files))
                ranks[0].prune(keep_last=keep_last, keep_best=True)
    finally:
        for rank in ranks:
            rank.close()
    return Place.of(url)


def _found() -> list[str]:
    return [place.name for place in checkpoints(Storage(f"{ROOT}/run"))]


def _rows(place: Place) -> list[float]:
    return States(place, read_manifest(place, expected_parameters="p")).rows("w").tolist()


def _nth(method: str, failing: int):
    """The request of this method and number, and all of its kind after it, are refused."""
    seen = []

    def fault(asked: str, path: str, number: int) -> str | None:
        seen.extend([path] if asked == method else [])
        return "403:AccessDenied" if asked == method and len(seen) > failing else None

    return fault


def test_what_two_ranks_upload_is_verified_and_read_and_nothing_stays_on_the_disk(
    store: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = _save(1)
    assert verify(place).policy_version == 1 and _rows(place) == [1.0, 1.0, 2.0, 2.0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", range(3))
def test_an_upload_that_is_torn_at_any_object_leaves_the_one_before(store: Proxy, failing: int):
    before = _save(1)
    store.fault = _nth("PUT", failing)
    with pytest.raises(CheckpointError, match=r"step-000002 was not saved: .*AccessDenied.*the last good one stands"):
        _save(2)
    store.fault = lambda method, path, number: None
    assert _found() == ["step-000001"] and _rows(before) == [1.0, 1.0, 2.0, 2.0]
    assert _rows(_save(2)) == [2.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize("failing", range(4))
def test_a_removal_that_ends_anywhere_leaves_the_new_one_and_no_torn_one(store: Proxy, failing: int):
    _save(1, keep_last=1)
    store.fault = _nth("DELETE", failing)
    _save(2, keep_last=1)
    store.fault = lambda method, path, number: None
    assert _found()[-1] == "step-000002" and all(verify(Place.of(f"{ROOT}/run/{name}")) for name in _found())
    _save(3, keep_last=1)
    assert Storage(f"{ROOT}/run").names() == ["step-000003"]


def test_the_newest_and_the_best_stay(store: Proxy):
    for step, metric in enumerate([0.1, 0.9, 0.3, None, 0.2], start=1):
        _save(step, metric=metric)
    assert _found() == ["step-000002", "step-000004", "step-000005"]


def test_what_a_killed_upload_left_is_no_checkpoint_and_goes_with_the_next(store: Proxy):
    root = Storage(f"{ROOT}/run")
    for step in (0, 1, 9):
        root.write_file(f"step-{step:06d}/model/config.json", b"{}")
    assert _found() == []
    with pytest.raises(CheckpointError, match=r"step-000001 is not a checkpoint: it has no manifest\.json"):
        verify(Place.of(f"{ROOT}/run/step-000001"))
    _save(2)
    # A later one may be another driver's that is under way.
    assert root.names() == ["step-000002", "step-000009"]


def test_a_version_that_stands_keeps_its_files_and_takes_a_rating_and_another_version_does_not_replace_it(store: Proxy):
    place = _save(1)
    files = read_manifest(place).files
    for metric, rated in ((0.5, 0.5), (None, 0.5), (0.7, 0.7)):
        _save(1, metric=metric)
        found = verify(place)
        assert (found.metric, found.rated_by, found.extra) == (rated, "accuracy", {"metric": rated})
        assert found.files == files
    with pytest.raises(CheckpointError, match=r"step-000001 stands already, of version 1"):
        _save(1, version=3)
    assert verify(place).policy_version == 1


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda name, root: root.remove(name), "is torn: state-00001-of-00002.safetensors is missing"),
        (lambda name, root: root.write_file(name, b"short"), r"is torn: state-00001.* has 5 bytes instead of"),
        (lambda name, root: root.write_file(name, _flipped(root.read_file(name))), "was altered: state-00001"),
    ],
    ids=["missing", "torn", "altered"],
)
def test_a_damaged_object_is_refused_and_the_one_before_offered(store: Proxy, damage, says: str):
    _save(1)
    place = _save(2)
    damage(f"{place.name}/{read_manifest(place).folder}/{state_name(1, 2)}", place.root)
    for read in (verify, _rows):
        with pytest.raises(CheckpointError, match=says + r".*the one before it is s3://.*step-000001"):
            read(place)


def _flipped(content) -> bytes:
    whole = bytearray(content)
    whole[-1] ^= 1
    return bytes(whole)


@pytest.mark.parametrize("seed", range(3))
def test_a_store_that_fails_now_and_then_loses_nothing(store: Proxy, seed: int):
    store.fault = seeded(seed, share=0.3)
    for step in (1, 2, 3):
        assert _rows(_save(step, keep_last=1)) == [step, step, step + 1.0, step + 1.0]
    assert store.made and _found() == ["step-000003"]


def test_a_manifest_that_another_driver_created_is_not_replaced(store: Proxy, monkeypatch: pytest.MonkeyPatch):
    theirs = _save(1)
    monkeypatch.setattr(StoreTarget, "begin", _begin_as_if_alone)
    with pytest.raises(CheckpointError, match=r"step-000001 was not saved: .*manifest\.json exists already"):
        _save(1, version=7)
    assert read_manifest(theirs).policy_version == 1


class _Driver:
    """One rank's save of step 10, act by act."""

    def __init__(self, save_id: str) -> None:
        self._target = StoreTarget(f"{ROOT}/run/step-000010", is_first=True, save_id=save_id)
        self._weights = torch.full((2,), float(ord(save_id)))
        self._entries: dict[str, FileEntry] = {}

    def begin(self) -> None:
        assert self._target.begin(_manifest(10))

    def upload(self, rank: int) -> None:
        name = state_name(rank, 2)
        self._entries[name] = write_tensors(self._target.folder() / name, {"w": self._weights}, in_blocks=True)
        self._target.deliver([name])

    def commit(self) -> None:
        try:
            self._target.commit(_manifest(10).sealed(self._entries))
            self._target.prune(keep_last=1, keep_best=False)
        finally:
            self._target.close()


def test_of_two_drivers_that_save_one_step_neither_touches_the_others_files(store: Proxy):
    """ "a" was frozen half-way; "b" takes over, saves the same step, and "a" wakes."""
    a, b = _Driver("a"), _Driver("b")
    a.begin()
    a.upload(0)
    b.begin()
    b.upload(0)
    b.upload(1)
    b.commit()
    a.upload(1)
    with pytest.raises(CheckpointError, match="a save that began later removed its files"):
        a.commit()
    place = Place.of(f"{ROOT}/run/step-000010")
    assert verify(place).folder == "b" and _rows(place) == [98.0] * 4
    assert place.root.names(place.name) == ["b", "manifest.json"]


def test_a_commit_whose_answer_was_lost_stands_though_another_driver_has_rated_it_since(store: Proxy):
    a = _Driver("a")
    a.begin()
    for rank in (0, 1):
        a.upload(rank)
    a._target.commit(_manifest(10).sealed(a._entries))
    _save(10, metric=0.5)
    a.commit()
    place = Place.of(f"{ROOT}/run/step-000010")
    assert verify(place).metric == 0.5 and _rows(place) == [97.0] * 4


def test_a_save_that_begins_leaves_the_files_of_one_under_way(store: Proxy):
    a, b = _Driver("a"), _Driver("b")
    a.begin()
    a.upload(0)
    a.upload(1)
    b.begin()
    b.upload(0)
    a.commit()
    assert _rows(Place.of(f"{ROOT}/run/step-000010")) == [97.0] * 4


def test_a_save_whose_files_a_later_save_removed_does_not_become_a_checkpoint(store: Proxy):
    """Seen in review: the torn checkpoint was kept as the best, and the true best was removed."""
    a = _Driver("a")
    a.begin()
    a.upload(0)
    _save(20)  # of the ranks that took the place of "a"'s
    a.upload(1)
    with pytest.raises(CheckpointError, match=r"step-000010 was not saved: a save that began later removed its files"):
        a.commit()
    assert _found() == ["step-000020"]


def test_a_save_whose_files_are_removed_while_it_commits_takes_its_manifest_back(store: Proxy, monkeypatch):
    a, create = _Driver("a"), Storage.create
    a.begin()
    a.upload(0)
    a.upload(1)

    def create_late(self: Storage, name: str, content: bytes) -> None:
        self.remove_folder("step-000010")
        create(self, name, content)

    monkeypatch.setattr(Storage, "create", create_late)
    with pytest.raises(CheckpointError, match=r"step-000010 was not saved: a save that began later removed its files"):
        a.commit()
    assert _found() == []


def test_a_best_checkpoint_that_cannot_be_read_for_a_moment_stays(store: Proxy):
    _save(1, metric=0.9)
    _save(2, metric=0.1)
    store.fault = lambda method, path, number: (
        "403:AccessDenied" if method == "GET" and "step-000001/manifest" in path else None
    )
    _save(3, keep_last=1)
    assert _found() == ["step-000001", "step-000002", "step-000003"]
    store.fault = lambda method, path, number: None
    _save(4, keep_last=1)
    assert _found() == ["step-000001", "step-000004"]


_whole_begin = StoreTarget.begin


def _begin_as_if_alone(self: StoreTarget, manifest: Manifest) -> bool:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Place, "exists", lambda place, file: False)
        patched.setattr(Storage, "remove_folder", lambda root, name: None)
        return _whole_begin(self, manifest)
