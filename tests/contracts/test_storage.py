"""Every place of files keeps the same promises: a disk, a store in memory, S3 (moto), Azure (Azurite), and those two with
requests that fail now and then."""

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest
from obstore.store import MemoryStore

from cluster.contracts.errors import AlreadyExistsError, StorageError
from cluster.record import object_store
from cluster.record.local_files import LocalFiles
from cluster.record.object_store import ObjectStore
from tests.object_store import azure, quick_requests, s3
from tests.store_proxy import Proxy, seeded

_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with s3("bucket") as proxy:
        yield proxy


@pytest.fixture(scope="module")
def azurite() -> Iterator[Proxy]:
    with azure("box") as proxy:
        yield proxy


@pytest.fixture(params=["disk", "memory", "s3", "faulty s3", "azure", "faulty azure"])
def files(request, tmp_path, monkeypatch) -> Iterator[LocalFiles | ObjectStore]:
    quick_requests(monkeypatch)
    if request.param == "disk":
        yield LocalFiles(str(tmp_path))
    elif request.param == "memory":
        yield ObjectStore("s3://memory/run", store=MemoryStore())
    else:
        proxy: Proxy = request.getfixturevalue("azurite" if "azure" in request.param else "proxy")
        proxy.fault = seeded(7, share=0.3 if "faulty" in request.param else 0.0)
        place = "az://box" if "azure" in request.param else "s3://bucket"
        yield ObjectStore(f"{place}/run-{next(_NUMBERS)}")
        proxy.fault = lambda method, path, number: None


def test_a_file_comes_back_whole(files):
    files.write("checkpoints/a.bin", b"abc")
    files.write("checkpoints/a.bin", b"defg")
    assert files.read("checkpoints/a.bin").to_pybytes() == b"defg"
    files.write("checkpoints/a.bin", pa.py_buffer(b"\xff\x00"))
    assert files.read("checkpoints/a.bin").to_pybytes() == b"\xff\x00"
    files.create("checkpoints/c.bin", files.read("checkpoints/a.bin"))
    assert files.exists("checkpoints/a.bin") and not files.exists("checkpoints/b.bin")


def test_a_range_ends_with_the_file(files):
    files.write("a.bin", bytes(range(10)))
    assert files.read_range("a.bin", 2, 3).to_pybytes() == b"\x02\x03\x04"
    assert files.read_range("a.bin", 8, 5).to_pybytes() == b"\x08\x09"


def test_names_are_of_one_level(files):
    for name in ("b/2", "b/1", "b/c/3", "bb/4", "0"):
        files.write(name, b"")
    assert files.names("") == ["0", "b", "bb"]
    assert files.names("b") == files.names("b/") == ["1", "2", "c"]
    assert files.names("a") == []


def test_folders_are_told_from_files_by_more_than_their_names(files):
    for name in ("b/lr-0.1/1", "b/c/3", "b/plain"):
        files.write(name, b"")
    assert files.folders("") == ["b"]
    assert files.folders("b") == files.folders("b/") == ["c", "lr-0.1"]
    assert files.folders("a") == files.folders("b/c") == []


def test_a_file_that_is_written_anew_has_another_version_and_all_others_keep_theirs(files):
    for name in ("b/1", "b/2", "b/c/3"):
        files.write(name, b"one")
    before = files.versions("b")
    assert set(before) == {"1", "2"} and files.versions("b") == before
    files.write("b/1", b"other")
    after = files.versions("b")
    assert after["1"] != before["1"] and after["2"] == before["2"]
    assert files.versions("a") == {}


def test_a_folder_goes_with_all_that_is_in_it(files):
    for name in ("a/1", "a/b/2", "ab/3"):
        files.write(name, b"")
    for _ in range(2):
        files.remove_folder("a")
    assert files.names("") == ["ab"]


def test_what_is_not_there_is_removed_already_and_cannot_be_read(files):
    files.write("a", b"")
    for _ in range(2):
        files.remove("a")
    for read in (lambda: files.read("a"), lambda: files.read_range("a", 0, 1)):
        with pytest.raises(StorageError, match=r"/a: .*it is missing: check the path"):
            read()


def test_of_all_who_create_a_file_one_succeeds(files):
    start = threading.Barrier(8)

    def create(number: int) -> int | None:
        start.wait()
        try:
            files.create("ledger/000001.json", b"%d" % number)
        except AlreadyExistsError:
            return None
        return number

    if isinstance(files, LocalFiles):
        start = threading.Barrier(1)
        found = [create(number) for number in range(8)]
    else:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(create, range(8)))
    (winner,) = (each for each in found if each is not None)
    assert files.read("ledger/000001.json").to_pybytes() == b"%d" % winner


def test_a_large_file_goes_up_and_comes_down(files, tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "_PART_BYTES", 5 << 20)
    content = bytes(range(256)) * (48 << 10)
    (tmp_path / "large").write_bytes(content)
    files.upload("step/large", str(tmp_path / "large"))
    files.download("step/large", str(tmp_path / "again"))
    assert (tmp_path / "again").read_bytes() == content
    assert files.read_range("step/large", 5 << 20, 4).to_pybytes() == b"\x00\x01\x02\x03"


def test_lines_come_back_in_order_each_once(files):
    for number in range(40):
        files.append("metrics.jsonl", f"{number}", is_durable=False)
        if number % 8 == 0:
            files.flush()
    assert files.read_appended("metrics.jsonl") == "".join(f"{number}\n" for number in range(40))
    files.replace_appended("metrics.jsonl", "39\n")
    files.append("metrics.jsonl", "40", is_durable=True)
    files.compact()
    assert files.read_appended("metrics.jsonl") == "39\n40\n"
    assert files.exists("metrics.jsonl") and not files.exists("events.jsonl")
    files.remove("metrics.jsonl")
    assert not files.exists("metrics.jsonl") and files.read_appended("metrics.jsonl") == ""


def test_the_last_lines_are_read_and_replaced_alone(files):
    assert files.read_last("metrics.jsonl", 2) == ""
    for number in range(10):
        files.append("metrics.jsonl", f"{number}", is_durable=False)
        if number in (3, 6):
            files.flush()
    assert [files.read_last("metrics.jsonl", count) for count in (1, 4)] == ["9\n", "6\n7\n8\n9\n"]
    assert (
        files.read_last("metrics.jsonl", 10)
        == files.read_last("metrics.jsonl", 99)
        == files.read_appended("metrics.jsonl")
    )
    files.replace_last("metrics.jsonl", 5, "five\nsix\n")
    assert files.read_appended("metrics.jsonl") == "0\n1\n2\n3\n4\nfive\nsix\n"
    files.append("metrics.jsonl", "7", is_durable=False)
    files.replace_last("metrics.jsonl", 99, "all\n")
    files.append("metrics.jsonl", "8", is_durable=True)
    files.flush()
    assert files.read_appended("metrics.jsonl") == "all\n8\n"
    files.replace_last("events.jsonl", 3, "first\n")
    assert files.read_appended("events.jsonl") == "first\n"


def test_of_two_who_change_one_version_the_first_succeeds(files):
    if isinstance(files, LocalFiles):
        pytest.skip("a disk has locks instead")
    first = files.write_if("driver.lock", b"one", None)
    assert files.write_if("driver.lock", b"other", None) is None
    second = files.write_if("driver.lock", b"two", first)
    assert second and files.write_if("driver.lock", b"three", first) is None
    assert files.read_tagged("driver.lock") == (b"two", second)
    files.remove("driver.lock")
    assert files.write_if("driver.lock", b"four", second) is None and files.read_tagged("driver.lock") is None


def test_azure_names_a_container_that_does_not_exist_in_one_line(azurite):
    with pytest.raises(
        StorageError,
        match=r"^az://boxx/run: The specified container does not exist \(ContainerNotFound\); create it, or name another one$",
    ):
        ObjectStore("az://boxx/run").names("")
