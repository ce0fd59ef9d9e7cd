"""A run that is stopped while Ray starts."""

import asyncio
import os
import threading

import pytest
import ray

from deploy.cluster_up.connection import connected


@pytest.mark.parametrize("num_presses", [1, 2])
async def test_a_start_that_is_cancelled_keeps_its_token_until_ray_is_up_and_ends_it(num_presses, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()
    modes: list[str | None] = []
    ended: list[bool] = []

    def init(*_: object, **__: object) -> None:
        begun.set()
        may_end.wait(10)
        modes.append(os.environ.get("RAY_AUTH_MODE"))

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))

    async def run() -> None:
        async with connected(None):
            raise AssertionError("the start was cancelled")

    running = asyncio.create_task(run())
    await asyncio.to_thread(begun.wait, 10)
    for _ in range(num_presses):
        running.cancel()
        await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert modes == ["token"] and ended == [True]
