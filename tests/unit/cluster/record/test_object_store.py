"""What an object store's errors come to, and conditional writes whose answers are lost."""

import itertools
import os

import pytest
from obstore.store import MemoryStore

from cluster.contracts.errors import AlreadyExistsError, StorageError
from cluster.record import object_store
from cluster.record.object_store import ObjectStore
from cluster.record.run_directory import RunDirectory
from cluster.record.storage import Storage
from cluster.record.store_errors import message_of
from tests.object_store import environment, quick_requests, s3


@pytest.fixture(scope="module")
def server():
    with s3("bucket") as proxy:
        yield proxy


@pytest.fixture
def proxy(server, monkeypatch):
    quick_requests(monkeypatch)
    yield server
    server.fault = lambda method, path, number: None


def test_a_bucket_that_does_not_exist_is_named_whatever_is_asked_of_it(proxy):
    for ask in ("exists", "read", "remove"):
        with pytest.raises(
            StorageError,
            match=r"^s3://buckett/run: The specified bucket does not exist \(NoSuchBucket\); create it, or name",
        ):
            getattr(ObjectStore("s3://buckett/run"), ask)("run.yaml")
    with pytest.raises(StorageError, match=r"^s3://buckett/run: The specified bucket does not exist"):
        ObjectStore("s3://buckett/run").reach()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "403:AccessDenied",
            r"AccessDenied, says the store \(AccessDenied\); give these credentials the right to list, read, write",
        ),
        ("403:RequestTimeTooSkewed", r"RequestTimeTooSkewed, .*; set this machine's clock$"),
        (
            "403:InvalidAccessKeyId",
            r"InvalidAccessKeyId, .*; mend the credentials in the environment \(AWS_ACCESS_KEY_ID",
        ),
        ("301:PermanentRedirect", "the bucket is in another region; set AWS_REGION to it$"),
    ],
)
def test_a_refusal_says_what_helps(proxy, fault, message):
    files = ObjectStore("s3://bucket/run")
    proxy.fault = lambda method, path, number: fault
    with pytest.raises(StorageError, match=f"^s3://bucket/run: {message}") as refused:
        files.write("run.yaml", b"")
    assert "test-secret" not in str(refused.value) and refused.value.__cause__ is None


def test_a_right_that_is_missing_for_one_object_names_it(proxy):
    files = ObjectStore("s3://bucket/run")
    files.write("a", b"")
    proxy.fault = lambda method, path, number: "403:AccessDenied" if method == "PUT" else None
    with pytest.raises(StorageError, match=r"^s3://bucket/run/b: AccessDenied, says the store \(AccessDenied\); give"):
        files.write("b", b"")


def test_an_endpoint_that_does_not_answer_is_named_by_its_setting(proxy, monkeypatch):
    monkeypatch.setattr(object_store, "FIRST_RETRY", {**object_store.FIRST_RETRY, "max_retries": 0})
    monkeypatch.setattr(object_store, "FIRST_PATIENCE_S", 0.0)
    for endpoint in ("http://127.0.0.1:9", "http://nowhere.invalid"):
        with (
            environment({"AWS_ENDPOINT_URL": endpoint}),
            pytest.raises(StorageError, match="does not answer; check AWS_ENDPOINT_URL"),
        ):
            ObjectStore("s3://bucket/run").reach()


@pytest.mark.parametrize("url", ["ftp://bucket/run", "s3://", "s3:///run", "S4://bucket"])
def test_what_is_no_place_for_files_is_refused(url):
    with pytest.raises(
        StorageError,
        match=r"is no place for files: use a local path, or s3://, gs:// or az:// with the name of a bucket$",
    ):
        ObjectStore(url)


def test_azures_error_of_two_lines_becomes_one():
    text = (
        "Generic MicrosoftAzure error: Error performing GET https://account.blob.core.windows.net/box?sig=secret in 2ms - Server returned "
        "non-2xx status code: 404 Not Found: <?xml version='1.0'?><Error><Code>ContainerNotFound</Code><Message>The specified container "
        "does not exist.\nRequestId:5a2f\nTime:2026-11-23T04:00:00Z</Message></Error>\n\nDebug source:\n..."
    )
    assert (
        message_of(OSError(text))
        == "The specified container does not exist (ContainerNotFound); create it, or name another one"
    )


def test_without_an_account_azure_says_which_credentials_are_missing(monkeypatch):
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_USE_EMULATOR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(StorageError, match=r"az://box/run: no credentials; .*AZURE_STORAGE_ACCOUNT_NAME"):
        ObjectStore("az://box/run")


@pytest.mark.parametrize("fault", ["lost_answer", "twice", "slow_down", "reset_before", "stall"])
def test_a_conditional_write_that_is_made_again_finds_its_own_content(proxy, fault):
    files = ObjectStore(f"s3://bucket/{fault}")
    files.names("")
    puts = []

    def at_first(method, path, number):
        puts.extend([path] if method == "PUT" else [])
        return fault if method == "PUT" and len(puts) == 1 else None

    proxy.fault = at_first
    files.create("ledger/000001.json", b"ours")
    with pytest.raises(AlreadyExistsError):
        files.create("ledger/000001.json", b"theirs")
    assert files.read("ledger/000001.json").to_pybytes() == b"ours"


def test_an_answer_that_is_lost_does_not_lose_a_change(proxy):
    files = ObjectStore("s3://bucket/lost")
    first = files.write_if("driver.lock", b"one", None)
    puts = []

    def at_first(method, path, number):
        puts.extend([path] if method == "PUT" else [])
        return "lost_answer" if method == "PUT" and len(puts) == 1 else None

    proxy.fault = at_first
    assert files.write_if("driver.lock", b"two", first) == files.read_tagged("driver.lock")[1]


def test_an_almost_full_disk_that_takes_a_part_of_a_download_is_named(tmp_path, monkeypatch):
    files = ObjectStore("s3://memory/run", store=MemoryStore())
    files.write("model", b"12345")
    monkeypatch.setattr(os, "pwrite", lambda descriptor, part, start: len(part) - 1)
    with pytest.raises(StorageError, match=rf"^{tmp_path}/model: No space left on device; free space"):
        files.download("model", str(tmp_path / "model"))


def test_a_store_that_stays_busy_is_an_error_in_the_end(proxy, monkeypatch):
    files = ObjectStore("s3://bucket/busy")
    files.names("")
    monkeypatch.setattr(object_store, "PATIENCE_S", 0.0)
    proxy.fault = lambda method, path, number: "slow_down"
    with pytest.raises(StorageError, match=r"busy/a: SlowDown, says the store \(SlowDown\); the store was busy"):
        files.write("a", b"")


def test_a_store_that_is_busy_at_first_is_asked_again_as_at_any_other_time(proxy, monkeypatch):
    monkeypatch.setattr(object_store, "FIRST_PATIENCE_S", 0.0)
    requests = itertools.count()
    proxy.fault = lambda method, path, number: "slow_down" if next(requests) < 10 else None
    files = ObjectStore("s3://bucket/busy-at-first")
    files.reach()
    assert files.names("") == []


def test_a_store_that_is_away_when_it_is_first_asked_is_waited_for_but_by_a_command(proxy, monkeypatch):
    """A rank that begins again asks it for the first time, and so does every save."""
    monkeypatch.setattr(object_store, "FIRST_PATIENCE_S", 0.0)
    requests = itertools.count()
    proxy.fault = lambda method, path, number: "reset_before" if next(requests) < 60 else None
    for command in (
        lambda run_dir: run_dir.check(""),
        lambda run_dir: run_dir.claim(""),
        lambda run_dir: run_dir.refuse_if_busy(),
    ):
        with pytest.raises(StorageError, match=r"^s3://bucket/first: the store does not answer"):
            command(RunDirectory("s3://bucket/first"))
    assert next(requests) < 60, "commands leave the store away"
    assert Storage("s3://bucket/first").names() == []
