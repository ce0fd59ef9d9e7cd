"""Real servers of object stores for tests, each behind a proxy that makes faults."""

import base64
import contextlib
import functools
import hmac
import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from email.utils import formatdate
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from cluster.record import object_store
from tests.ports import free_ports
from tests.store_proxy import Proxy


def quick_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses before a request is made again."""
    backoff = {"init_backoff": timedelta(milliseconds=2), "max_backoff": timedelta(milliseconds=20)}
    for name in ("RETRY", "FIRST_RETRY"):
        monkeypatch.setattr(object_store, name, {**getattr(object_store, name), "backoff": backoff})
    monkeypatch.setattr(object_store, "FIRST_PAUSE_S", 0.002)


AWS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test-secret", "AWS_REGION": "us-east-1"}


@contextlib.contextmanager
def s3(*buckets: str) -> Iterator[Proxy]:
    """moto behind a proxy, with these buckets, which are empty; the environment says where it is. All tests share the server."""
    port = _moto_port()
    proxy = Proxy("127.0.0.1", port)
    for bucket in buckets:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("PUT", f"/{bucket}")
        assert connection.getresponse().status == 200
    try:
        with environment({**AWS, "AWS_ENDPOINT_URL": proxy.url}):
            for bucket in buckets:
                store = S3Store(bucket, endpoint=f"http://127.0.0.1:{port}", client_options={"allow_http": True})
                obstore.delete(store, [each["path"] for each in obstore.list(store).collect()])
            yield proxy
    finally:
        proxy.close()


_MOTO = """
import ctypes, signal, sys, threading
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with the thread that started it: pytest's processes may end without a word to atexit
from moto.moto_server.werkzeug_app import DomainDispatcherApplication as Application
from moto.server import main
# Unlike S3, moto looks whether an object exists and then writes it: of two who create one at the same moment, both would succeed.
serve, lock = Application.__call__, threading.Lock()
def one_at_a_time(*request):
    with lock:
        return serve(*request)
Application.__call__ = one_at_a_time
main(["-H", "127.0.0.1", "-p", sys.argv[1]])
"""


@functools.cache
def _moto_port() -> int:
    """Of a server in a process of its own, which ends with ours: its modules in pytest's process would break vLLM's look through them."""
    (port,) = free_ports(1)
    server = subprocess.Popen(
        [sys.executable, "-c", _MOTO, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while server.poll() is None:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=30):
            return port
        time.sleep(0.05)
    pytest.fail("moto ended before it listened")


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


AZURITE = Path(__file__).parents[1] / "build/azurite/node_modules/.bin/azurite-blob"
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, which its documentation prints: no secret."""


@contextlib.contextmanager
def azure(container: str) -> Iterator[Proxy]:
    """Azurite behind a proxy, with this container; the environment says where it is. Skips where Azurite is not installed."""
    if not AZURITE.exists():
        missing = "azurite is missing: npm install --prefix build/azurite azurite"
        if os.environ.get("TREADWHEEL_NEEDS_AZURITE") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    (port,) = free_ports(1)
    options = [
        "--blobHost",
        "127.0.0.1",
        "--blobPort",
        str(port),
        "--inMemoryPersistence",
        "--silent",
        "--skipApiVersionCheck",
        "--disableTelemetry",
    ]
    server = subprocess.Popen([AZURITE, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    proxy = Proxy("127.0.0.1", port)
    try:
        for line in server.stdout or ():
            if "successfully" in line:
                break
        else:
            pytest.fail("azurite ended before it listened")
        _create_container(port, container)
        with environment({"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": proxy.url}):
            yield proxy
    finally:
        proxy.close()
        server.kill()
        server.wait()


def _create_container(port: int, name: str) -> None:
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
    signed = "".join(f"{key}:{value}\n" for key, value in headers.items())
    text = "PUT" + "\n" * 12 + signed + f"/{_ACCOUNT}/{_ACCOUNT}/{name}\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(_KEY), text.encode(), "sha256")).decode()
    headers |= {"Authorization": f"SharedKey {_ACCOUNT}:{signature}", "Content-Length": "0"}
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("PUT", f"/{_ACCOUNT}/{name}?restype=container", headers=headers)
    answer = connection.getresponse()
    assert answer.status == 201, answer.read()
