"""Copies of objects are optional: one that cannot be made is one of our errors, within its time."""

import asyncio
from functools import partial
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ObjectStoreFullError

from cluster.contracts.errors import DeadlineError, WorkerError
from cluster.remote import objects
from cluster.remote.objects import Copier


async def value() -> str:
    return "value"


async def test_a_full_object_store_is_an_error_of_ours(monkeypatch):
    def put(value):
        raise ObjectStoreFullError("full")

    monkeypatch.setattr(ray, "put", put)
    with pytest.raises(WorkerError, match="failed in 'copy': ObjectStoreFullError"):
        await Copier().copy(value(), deadline_s=600.0)


async def test_copies_of_weeks_are_not_remembered_for_ever(monkeypatch):
    copies = iter(f"{number:056x}" for number in range(5))
    monkeypatch.setattr(ray, "put", lambda value: SimpleNamespace(hex=partial(str, next(copies))))
    monkeypatch.setattr(objects, "_MOST_REMEMBERED", 2)
    copier = Copier()
    for _ in range(5):
        await copier.copy(value(), deadline_s=600.0)
    assert [*copier._made] == [f"{number:056x}" for number in (3, 4)]


async def test_putting_a_copy_is_bounded_as_fetching_it_is(monkeypatch):
    async def put_never(function, *args):
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "to_thread", put_never)
    with pytest.raises(DeadlineError, match="did not finish 'copy' within"):
        async with asyncio.timeout(120):
            await Copier().copy(value(), deadline_s=0.01)
