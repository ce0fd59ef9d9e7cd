"""A run that is stopped while Ray starts."""

import asyncio
import contextlib
import os
import threading

import pytest
import ray
import ray.exceptions

from cluster.contracts.errors import ConfigError, WorkerError
from cluster.record.run_directory import RunDirectory
from deploy.cluster_up.ahead import RayAhead
from deploy.cluster_up.connection import connected, job_metadata
from deploy.reports.provenance import digest_of


@pytest.mark.parametrize("num_presses", [1, 2])
async def test_a_start_that_is_cancelled_keeps_its_token_until_ray_is_up_and_ends_it(num_presses, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()
    modes: list[str | None] = []
    ended: list[bool] = []

    def init(*_: object, **__: object) -> None:
        begun.set()
        may_end.wait(60)
        modes.append(os.environ.get("RAY_AUTH_MODE"))

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))

    async def run() -> None:
        async with connected(None):
            raise AssertionError("the start was cancelled")

    running = asyncio.create_task(run())
    assert await asyncio.to_thread(begun.wait, 60)
    for _ in range(num_presses):
        running.cancel()
        await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert modes == ["token"] and ended == [True]


async def test_with_an_empty_address_a_run_starts_its_own_ray(monkeypatch):
    starts: list[str] = []
    monkeypatch.setenv("RAY_ADDRESS", "")
    monkeypatch.setattr(ray, "init", lambda address, **_: starts.append(address))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    async with connected(None):
        pass
    assert starts == ["local"]


@pytest.mark.parametrize("address", [None, "127.0.0.1:6379"])
async def test_the_programs_own_ray_is_refused_and_left_as_it_is(address, monkeypatch):
    """Seen in review: Ray's RuntimeError, and the objects of the program's own session were gone."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("connected a second time"))
    monkeypatch.setattr(ray, "shutdown", lambda: pytest.fail("ended the program's session"))
    refusal = r"connected to Ray already, .*; call ray.shutdown\(\) first, or start the run in another process"
    with pytest.raises(ConfigError, match=refusal):
        async with connected(address):
            pass
    with pytest.raises(ConfigError, match=refusal), RayAhead(address) as ahead:
        ahead.start()


@pytest.mark.parametrize(("num_late", "says"), [(2, None), (3, "did not start on this machine within 3 times 30 s")])
async def test_a_ray_that_comes_up_too_late_on_a_busy_machine_is_ended_and_started_again(num_late, says, monkeypatch):
    asked: list[str] = []

    def init(address: str, **_: object) -> None:
        asked.append(address)
        if asked.count("local") <= num_late:
            raise Exception("The current node timed out during startup. This could happen because ...")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: asked.append("end"))
    with contextlib.nullcontext() if says is None else pytest.raises(WorkerError, match=says):
        async with connected(None):
            pass
    assert asked == ["local", "end"] * 3


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ray.exceptions.AuthenticationError("Token authentication is enabled but no token"), "set RAY_AUTH_MODE=token"),
        (
            RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.52.0"),
            "Ray: 2.52.0; install the same",
        ),
    ],
)
async def test_a_cluster_that_asks_for_a_token_or_has_another_version_is_one_clear_error(error, says, monkeypatch):
    def init(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConfigError, match=says):
        async with connected("auto"):
            pass


async def test_an_address_without_a_port_is_told():
    """Seen before: Ray's ValueError, with its traceback."""
    with pytest.raises(ConfigError, match="address='garbage' is not of the form host:port; write one, or 'auto'"):
        async with connected("garbage"):
            pass


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "head..example:6379"])
async def test_a_port_or_a_name_that_cannot_be_is_an_address_that_does_not_answer(address):
    with pytest.raises(ConfigError, match=f"address={address!r} does not answer"):
        async with connected(address):
            pass


def test_rays_dashboard_says_where_the_run_is_how_it_is_looked_at_and_what_its_passport_is(tmp_path):
    place = tmp_path / "a run"
    told = {"run_dir": str(place), "viewer": f"treadwheel view '{place}'"}
    assert job_metadata(RunDirectory(str(place))) == told, "its passport is written once the learner has told of itself"
    place.mkdir()
    (place / "passport.json").write_text('{"mathematics": {"steps": 1}}')
    told["passport"] = digest_of({"mathematics": {"steps": 1}})
    assert job_metadata(RunDirectory(str(place))) == told
