"""Files below a prefix of a bucket: s3://, gs:// or az://, through obstore.

Credentials come from the environment or the machine. Messages leave out the URLs in a store's answer, which may carry a signature. `create`
and `write_if` are conditional: of all concurrent writers of one name, one succeeds. A request whose answer was lost is made again, and
finds its own content.
"""

import contextlib
import errno
import os
import posixpath
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import obstore
import pyarrow as pa
from obstore.exceptions import AlreadyExistsError as _Exists
from obstore.exceptions import BaseError, GenericError, PreconditionError
from obstore.store import AzureStore, GCSStore, S3Store

from cluster.contracts.errors import AlreadyExistsError, StorageError
from cluster.record.local_files import naming
from cluster.record.segments import Segments, is_lines
from cluster.record.store_errors import is_busy, is_of_the_bucket, may_pass, message_of

OBJECT_STORES: dict[str, Callable[..., Any]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AZURE_STORAGE_ENDPOINT", "AZURITE_BLOB_STORAGE_URL")
_MANY = 16
"""Requests at a time."""
_PART_BYTES = 8 << 20
_MOST_PARTS = 9_000
"""Most parts of one upload; S3 takes 10,000."""
CLIENT: dict[str, Any] = {"connect_timeout": "5s", "read_timeout": "30s", "timeout": "10m"}
FIRST_RETRY: dict[str, Any] = {"max_retries": 5, "retry_timeout": timedelta(seconds=10)}
RETRY: dict[str, Any] = {"max_retries": 10, "retry_timeout": timedelta(minutes=1)}
"""obstore's own retries of a request. It makes no request again that might do harm twice."""
FIRST_PATIENCE_S = 1.0
"""Patience of the first request: it is made again if an answer broke off, not if there was none."""
PATIENCE_S = 60.0
"""How long a request is made again, broken transfers and conditional writes too. Our requests do no harm twice."""
FIRST_PAUSE_S = 0.1

Tag = dict[str, str]
"""Names a version of an object."""
Result = TypeVar("Result")


class ObjectStore:
    """The objects below one prefix by their names below it."""

    def __init__(self, url: str, *, store: Any = None) -> None:
        """Touches nothing. Raises StorageError for a URL of an unknown kind. `store` is obstore's; None makes the one that `url` names."""
        self.url = url.rstrip("/")
        self._made = _opened(self.url, RETRY) if store is None else store
        self._is_reached = store is not None
        self._lines = Segments(self)

    def reach(self) -> None:
        """Raises StorageError within seconds, sooner than all other calls, if the bucket is missing or nothing answers. A busy store
        passes."""
        if self._is_reached:
            return
        try:
            self._look(_opened(self.url, FIRST_RETRY), patience_s=FIRST_PATIENCE_S)
        except (BaseError, ValueError, OSError) as error:
            if not is_busy(error):
                raise StorageError(f"{self.url}: {message_of(error)}") from None

    def path(self, name: str = "") -> str:
        return posixpath.join(self.url, name) if name else self.url

    def read(self, name: str) -> pa.Buffer:
        return self._read(name)[0]

    def read_tagged(self, name: str) -> tuple[bytes, Tag] | None:
        """Content and version; None if the object does not exist."""
        try:
            content, tag = self._read(name, may_be_missing=True)
        except FileNotFoundError:
            return None
        return content.to_pybytes(), tag

    def read_range(self, name: str, start: int, length: int) -> pa.Buffer:
        with self._naming(name):
            return _again(lambda: pa.py_buffer(obstore.get_range(self._store, name, start=start, length=length)))

    def write(self, name: str, content: "pa.Buffer | bytes") -> None:
        with self._naming(name):
            _again(lambda: obstore.put(self._store, name, _uint8(content), chunk_size=_PART_BYTES))

    def create(self, name: str, content: "pa.Buffer | bytes") -> None:
        if self._write_if(name, content, mode="create") is None:
            raise AlreadyExistsError(f"{self.path(name)} exists already")

    def write_if(self, name: str, content: bytes, tag: Tag | None) -> Tag | None:
        """Writes if the object's version is `tag` (None: if it does not exist), and returns its new version. Else returns None.

        Two writers must not write the same content.
        """
        return self._write_if(name, content, mode="create" if tag is None else tag)

    def remove(self, name: str) -> None:
        if is_lines(name):
            self._lines.remove(name)
        else:
            self.delete([name])

    def modified_at(self, name: str) -> datetime:
        """Time of the last write, by the store's clock."""
        with self._naming(name):
            return _again(lambda: obstore.head(self._store, name))["last_modified"]

    def delete(self, names: Sequence[str]) -> None:
        """Deletes objects, several at a time. Some may be missing."""
        with ThreadPoolExecutor(_MANY) as pool:
            list(pool.map(self._delete, names))

    def remove_folder(self, name: str) -> None:
        with self._naming(name):
            found = _again(lambda: obstore.list(self._store, name).collect())
        self.delete([each["path"] for each in found])

    def exists(self, name: str) -> bool:
        return self._lines.exists(name) if is_lines(name) else self.has(name)

    def has(self, name: str) -> bool:
        """Whether there is an object of exactly this name."""
        return self.size_bytes(name) is not None

    def size_bytes(self, name: str) -> int | None:
        try:
            with self._naming(name, may_be_missing=True):
                return _again(lambda: obstore.head(self._store, name))["size"]
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        found = self._listed(folder)
        paths = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
        return sorted(posixpath.basename(path) for path in paths)

    def folders(self, folder: str) -> list[str]:
        return sorted(map(posixpath.basename, self._listed(folder)["common_prefixes"]))

    def versions(self, folder: str) -> dict[str, str]:
        found = self._listed(folder)["objects"]
        return {posixpath.basename(each["path"]): f"{each['e_tag']} {each['last_modified']}" for each in found}

    def upload(self, name: str, local_path: str) -> None:
        part_bytes = max(_PART_BYTES, os.path.getsize(local_path) // _MOST_PARTS + 1)
        with self._naming(name):
            _again(
                lambda: obstore.put(self._store, name, Path(local_path), chunk_size=part_bytes, max_concurrency=_MANY)
            )

    def download(self, name: str, local_path: str) -> None:
        with self._naming(name):
            size_bytes = _again(lambda: obstore.head(self._store, name))["size"]
        with naming(local_path), open(local_path, "wb") as file, ThreadPoolExecutor(_MANY) as pool:

            def fetch(start: int) -> None:
                part = self.read_range(name, start, _PART_BYTES)
                # An almost full disk takes a part without an error.
                if os.pwrite(file.fileno(), part, start) != part.size:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            list(pool.map(fetch, range(0, size_bytes, _PART_BYTES)))
            os.fsync(file.fileno())

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        """Contents in the order of `names`, read several at a time; None for missing objects."""
        with ThreadPoolExecutor(_MANY) as pool:
            return [found and found[0] for found in pool.map(self.read_tagged, names)]

    # Lines

    def append(self, name: str, line: str, *, is_durable: bool) -> None:
        self._lines.append(name, line)

    def read_appended(self, name: str) -> str:
        return self._lines.read(name)

    def replace_appended(self, name: str, text: str) -> None:
        self._lines.replace(name, text)

    def read_last(self, name: str, count: int) -> str:
        return self._lines.read_last(name, count)

    def replace_last(self, name: str, count: int, text: str) -> None:
        self._lines.replace_last(name, count, text)

    def flush(self) -> None:
        self._lines.flush()

    def compact(self) -> None:
        self._lines.compact()

    def _listed(self, folder: str) -> Any:
        with self._naming(folder):
            return _again(lambda: obstore.list_with_delimiter(self._store, folder.rstrip("/") or None))

    def _delete(self, name: str) -> None:
        with self._naming(name), contextlib.suppress(FileNotFoundError):
            _again(lambda: obstore.delete(self._store, name))

    def _read(self, name: str, *, may_be_missing: bool = False) -> tuple[pa.Buffer, Tag]:
        def get() -> tuple[pa.Buffer, Tag]:
            found = obstore.get(self._store, name)
            return pa.py_buffer(found.bytes()), _tag(found.meta)

        with self._naming(name, may_be_missing=may_be_missing):
            return _again(get)

    def _write_if(self, name: str, content: "pa.Buffer | bytes", *, mode: Any) -> Tag | None:
        """The object's new version; None if the condition does not hold and the object does not hold `content`."""

        def put() -> Tag | None:
            try:
                return _tag(obstore.put(self._store, name, _uint8(content), mode=mode))
            except FileNotFoundError as error:
                if mode == "create" or is_of_the_bucket(error):
                    raise
                return None
            except (_Exists, PreconditionError) as error:
                found = self.read_tagged(name)
                if found is None and mode == "create":
                    raise _Undecided from error  # removed meanwhile, or still being written
                return found[1] if found and found[0] == bytes(content) else None

        with self._naming(name):
            return _again(put)

    @property
    def _store(self) -> Any:
        """obstore's store. The first use lists, because a request for one object does not tell a missing bucket from a missing object."""
        if not self._is_reached:
            with self._naming(""):
                self._look(self._made, patience_s=PATIENCE_S)
        return self._made

    def _look(self, store: Any, *, patience_s: float) -> None:
        _again(lambda: obstore.list_with_delimiter(store), patience_s=patience_s)
        self._is_reached = True

    @contextlib.contextmanager
    def _naming(self, name: str, *, may_be_missing: bool = False) -> Iterator[None]:
        """Raises StorageError with the object and what helps. FileNotFoundError passes if the object may be missing."""
        try:
            yield
        except FileNotFoundError as error:
            if may_be_missing and not is_of_the_bucket(error):
                raise
            raise StorageError(f"{self.path(name)}: {message_of(error)}") from None
        except (BaseError, ValueError, OSError) as error:
            raise StorageError(f"{self.path(name)}: {message_of(error)}") from None


class _Undecided(GenericError):
    """A conditional write was refused, but there is no object that explains it."""

    def __init__(self) -> None:
        super().__init__("HTTP error: refused, and not there")


def _uint8(content: "pa.Buffer | bytes") -> memoryview:
    """As obstore needs it: it takes a buffer of another format, such as Arrow's, for an iterable of parts."""
    return memoryview(content).cast("B")


def _tag(found: Any) -> Tag:
    return {name: found[name] for name in ("e_tag", "version") if found[name]}


def _opened(url: str, retry: dict[str, Any]) -> Any:
    scheme, _, place = url.partition("://")
    bucket, _, prefix = place.partition("/")
    if scheme not in OBJECT_STORES or not bucket:
        raise StorageError(
            f"{url!r} is no place for files: use a local path, or s3://, gs:// or az:// with the name of a bucket"
        )
    is_plain = any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)
    options = {"client_options": {**CLIENT, "allow_http": is_plain}, "retry_config": retry}
    try:
        return OBJECT_STORES[scheme](bucket, prefix=prefix or None, **options)
    except (BaseError, ValueError, OSError) as error:
        raise StorageError(f"{url}: {message_of(error)}") from None


def _again(request: Callable[[], Result], *, patience_s: float | None = None) -> Result:
    """The request's result. Makes it again while its failures may pass."""
    deadline = time.monotonic() + (PATIENCE_S if patience_s is None else patience_s)
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return request()
        except GenericError as error:
            if not may_pass(error) or time.monotonic() > deadline:
                raise
        time.sleep(pause_s)
        pause_s = min(5.0, 2 * pause_s)
