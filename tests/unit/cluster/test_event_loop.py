"""A slow disk and a slow prompt source do not hold up the driver's event loop: neither is ever touched in its thread."""

import asyncio
import os
import threading
import time

from cluster.contracts.types import Prompt, SamplingParams
from cluster.metrics import MetricLog
from cluster.record.ledger import Ledger
from cluster.record.run_directory import RunDirectory
from cluster.rollouts.tickets import TicketOffice


class SlowPrompts:
    def __init__(self) -> None:
        self.threads: set[int] = set()

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Prompt:
        self.threads.add(threading.get_ident())
        time.sleep(0.02)
        return Prompt(prompt_id=str(index), text=str(index))


async def test_disk_and_prompts_are_waited_for_in_other_threads(tmp_path, monkeypatch):
    syncing: set[int] = set()
    sync = os.fsync

    def slow_sync(descriptor: int) -> None:
        syncing.add(threading.get_ident())
        time.sleep(0.02)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slow_sync)
    directory = RunDirectory(str(tmp_path))
    ledger = await asyncio.to_thread(Ledger, directory)
    source = SlowPrompts()
    sampling = SamplingParams(max_tokens=1)
    office = TicketOffice(source=source, seed=0, trajectories_per_group=2, sampling=sampling, num_ahead=4)
    log = MetricLog([], directory=directory)
    for step in range(3):
        tickets = await office.tickets(range(2 * step, 2 * step + 2), policy_version=step)
        indices = [ticket.index for ticket in tickets]
        await asyncio.to_thread(ledger.append, groups=indices, trajectories="file", trajectories_digest="digest")
        log.event("drop", group_id="0")
        log.step(step, {"reward/mean": 1.0})
    await asyncio.to_thread(log.close)
    office.close()
    here = threading.get_ident()
    assert syncing and here not in syncing
    assert source.threads and here not in source.threads
