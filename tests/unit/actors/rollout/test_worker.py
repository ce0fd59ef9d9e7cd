import asyncio
import dataclasses
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from actors.chat.formatter import ChatFormatter
from actors.rollout.group import GroupInProgress
from actors.rollout.worker import RolloutWorker
from cluster.contracts.errors import BroadcastError, DeadlineError, WeightsError, WorkerError
from cluster.contracts.sampling_config import SamplingConfig
from cluster.contracts.schema import info_of
from cluster.contracts.types import Completion, FinishReason, Prompt, RankGroup, Refusal, Ticket, sample_seed
from cluster.weights.attestation import Attestor
from cluster.weights.delta import PublishedCopy
from cluster.weights.manifest import Canary, WeightManifest
from cluster.weights.process_group import Incoming
from tests.models import make_tokenizer
from tests.packed import pack
from tests.unit.actors.scripted_engine import ScriptedEngine


def weights(version: int, *, value: float | None = None):
    """Manifest and buckets of a one-number model whose log-probs are all minus that number (its version, unless given)."""
    number = float(version if value is None else value)
    manifest, buckets = pack(
        [("still", torch.zeros(12)), ("w", torch.full((4,), number))],
        policy_version=version,
        bucket_bytes=1024,
        canary=Canary(token_ids=(1, 2, 3), logprobs=(-number, -number), starting_logprobs=(0.0, 0.0)),
    )
    return manifest.model_dump(), *buckets


def ticket(
    index: int, *, max_tokens: int = 3, text: str = "1+1=", num_trajectories: int = 2, num_extra_trajectories: int = 0
) -> Ticket:
    return Ticket(
        index=index,
        prompt=Prompt(prompt_id=f"p{index}", text=text, columns={"answer": "2"}),
        num_trajectories=num_trajectories,
        num_extra_trajectories=num_extra_trajectories,
        seed=100 + index,
        policy_version=0,
        sampling=SamplingConfig(max_tokens=max_tokens),
    )


@pytest.fixture
def make_worker():
    workers: list[RolloutWorker] = []

    def make(engine: ScriptedEngine, **settings) -> RolloutWorker:
        worker = RolloutWorker(
            name="w0",
            run_id="run",
            make_engine=lambda: engine,
            formatter=ChatFormatter(make_tokenizer(), max_context=64),
            attestor=Attestor(worker="w0", dtype="float32"),
            **settings,
        )
        workers.append(worker)
        return worker

    yield make
    for worker in workers:
        worker.stop()


async def collect(batches: AsyncIterator):
    return [batch async for batch in batches]


async def test_a_prompt_whose_column_cannot_be_its_sampling_costs_its_own_group(make_worker):
    worker = make_worker(ScriptedEngine())
    await worker.load(*weights(4))
    limited = dataclasses.replace(ticket(1), sampling=SamplingConfig(max_tokens=3, columns={"max_tokens": "answer"}))
    refused, batch = await collect(worker.generate([limited, ticket(2)]))
    assert refused.reason.startswith("prompt 'p1': column 'answer' is '2'; its max_tokens must be a whole number")
    assert batch["group_id"][0].as_py() == "00000002"


async def test_a_ticket_becomes_a_batch(make_worker):
    worker = make_worker(ScriptedEngine())
    await worker.load(*weights(4))
    (batch,) = await collect(worker.generate([ticket(7)]))
    assert batch["group_id"].to_pylist() == ["00000007"] * 2
    assert batch["prompt_text"].to_pylist() == ["1+1="] * 2
    assert batch["seed"].to_pylist() == [sample_seed(107, 0), sample_seed(107, 1)]
    first = sample_seed(107, 0) % 100
    assert batch["completion_token_ids"][0].as_py() == [first, first + 1, first + 2]
    assert batch["rollout_logprobs"].to_pylist() == [[-4.0] * 3] * 2
    assert batch["policy_versions"].to_pylist() == [[4, 4, 4]] * 2
    assert batch["finish_reason"].to_pylist() == ["length"] * 2
    assert info_of(batch, 0) == {"answer": "2"}


async def test_experts_come_with_their_trajectory(make_worker):
    worker = make_worker(ScriptedEngine(records_experts=True))
    await worker.load(*weights(1))
    (batch,) = await collect(worker.generate([ticket(0)]))
    assert batch["routed_experts"].to_pylist() == [bytes([6] * 6)] * 2, (
        "four of the prompt, and two of three that were sampled"
    )
    plain = make_worker(ScriptedEngine())
    await plain.load(*weights(1))
    assert (await collect(plain.generate([ticket(0)])))[0]["routed_experts"].null_count == 2


async def test_groups_come_as_they_finish(make_worker):
    worker = make_worker(ScriptedEngine())
    await worker.load(*weights(1))
    batches = await collect(worker.generate([ticket(0, max_tokens=9), ticket(1, max_tokens=2)]))
    assert [batch["ticket_index"][0].as_py() for batch in batches] == [1, 0]


async def test_all_tickets_of_a_call_are_in_the_first_step(make_worker):
    engine = ScriptedEngine()
    worker = make_worker(engine)
    await worker.load(*weights(1))
    before = len(engine.compositions)
    await collect(worker.generate([ticket(index) for index in range(5)]))
    assert len(engine.compositions[before]) == 10
    assert [request.seed for request in engine.added] == [sample_seed(100 + i, s) for i in range(5) for s in range(2)]


async def test_nothing_is_served_before_the_first_load(make_worker):
    with pytest.raises(WeightsError, match="no weights were loaded yet"):
        await collect(make_worker(ScriptedEngine()).generate([ticket(0)]))


async def test_an_attestation_says_what_was_loaded(make_worker):
    manifest, *buckets = weights(3)
    attestation = await make_worker(ScriptedEngine()).load(manifest, *buckets)
    assert (attestation.worker, attestation.policy_version, attestation.digest) == ("w0", 3, manifest["digest"])
    assert (attestation.canary_max_error, attestation.noise_floor, attestation.distinguishable) == (0.0, 0.0, True)


async def test_changes_are_loaded_as_the_whole_version_that_they_make_and_proved(make_worker):
    engine = ScriptedEngine()
    worker, published = make_worker(engine, keeps_weights=True), PublishedCopy()

    def publish(version: int):
        manifest, bucket = weights(version)
        *parts, whole = published.compared([bucket, WeightManifest.model_validate(manifest)])
        return whole, parts

    first, buckets = publish(1)
    await worker.load(first.model_dump(), *buckets)
    for version in (2, 3):
        manifest, (_, changes) = publish(version)
        attestation = await worker.load_changes(manifest.model_dump(), changes)
        assert (attestation.policy_version, attestation.digest) == (version, weights(version)[0]["digest"])
        assert engine.weight == version
    with pytest.raises(WeightsError, match=r"since version 2 .*this worker has version 3"):
        await worker.load_changes(manifest.model_dump(), changes)
    with pytest.raises(WeightsError, match="the last load failed: policy version 3 came as"):
        await collect(worker.generate([ticket(0)]))
    await worker.load(*weights(4))
    assert engine.weight == 4.0


async def test_an_engine_that_keeps_old_weights_is_caught_and_serves_nothing(make_worker):
    engine = ScriptedEngine()
    worker = make_worker(engine)
    await worker.load(*weights(1))
    engine.ignores_loads = True
    with pytest.raises(WeightsError, match="does not compute policy version 2"):
        await worker.load(*weights(2))
    with pytest.raises(WeightsError, match="the last load failed"):
        await collect(worker.generate([ticket(0)]))
    engine.ignores_loads = False
    await worker.load(*weights(3))
    assert len(await collect(worker.generate([ticket(0)]))) == 1


async def test_an_engine_that_is_broken_from_the_start_is_refused_and_may_not_call_it_noise(make_worker):
    engine = ScriptedEngine()
    engine.weight = 1.0
    with pytest.raises(WeightsError, match="does not compute what the learner computes with the same files"):
        await make_worker(engine).load(*weights(2))
    assert engine.weight == 1.0, "it is refused before it loads anything"


async def test_the_noise_of_a_worker_that_joins_late_is_measured_under_the_starting_files(make_worker):
    engine = ScriptedEngine()
    engine.weight = 4e-4
    late = await make_worker(engine).load(*weights(100))
    assert late.noise_floor == pytest.approx(4e-4)


async def test_an_altered_bucket_stops_service_before_the_engine_sees_it(make_worker):
    engine = ScriptedEngine()
    worker = make_worker(engine)
    await worker.load(*weights(1))
    manifest, bucket = weights(2)
    with pytest.raises(WeightsError, match="bucket 0 of 1"):
        await worker.load(manifest, np.zeros_like(bucket))
    assert engine.weight == 1.0
    with pytest.raises(WeightsError, match="nothing is served"):
        await collect(worker.generate([ticket(0)]))


async def test_an_aborted_group_is_left_out_and_the_others_go_on(make_worker):
    engine = ScriptedEngine()
    worker = make_worker(engine)
    await worker.load(*weights(1))
    loop = asyncio.get_running_loop()
    aborted = []

    def abort():
        aborting = worker.abort(["00000000", "00000099"])
        aborted.extend(asyncio.run_coroutine_threadsafe(aborting, loop).result())

    engine.at_step = {2: abort}
    (batch,) = await collect(worker.generate([ticket(0, max_tokens=9), ticket(1, max_tokens=9)]))
    assert batch["ticket_index"][0].as_py() == 1
    assert aborted == ["00000000"]
    assert len(await collect(worker.generate([ticket(0)]))) == 1
    assert len({request.request_id for request in engine.added}) == 6, "the former requests may be aborted late"


async def handed_over(make_worker, *, sampling: SamplingConfig | None = None, **settings):
    """Of two groups of a worker at version 1, the first of which has one finished completion of 2 tokens and one that never ends, and
    what the worker still made."""
    seeds = [sample_seed(100, index) for index in range(2)]
    engine = ScriptedEngine(length=lambda request: {seeds[0]: 2, seeds[1]: 10**9}.get(request.seed, 4))
    worker = make_worker(engine, **settings)
    await worker.load(*weights(1))
    loop, handing = asyncio.get_running_loop(), []
    ids = ["00000000", "00000099"]
    engine.at_step = {4: lambda: handing.append(asyncio.run_coroutine_threadsafe(worker.hand_over(ids), loop))}
    tickets = [ticket(0), ticket(1)]
    if sampling:
        tickets[0] = dataclasses.replace(tickets[0], sampling=sampling)
    batches = await collect(worker.generate(tickets))
    kept, unknown = await asyncio.wrap_future(handing[0])
    assert unknown is None and [batch["ticket_index"][0].as_py() for batch in batches] == [1]
    return kept


async def test_another_worker_goes_on_with_what_one_handed_over(make_worker):
    """Nothing is sampled twice, and each token keeps its log-prob and version."""
    kept = await handed_over(make_worker)
    num_kept = len(kept["token_ids"][1])
    assert len(kept["token_ids"][0]) == 2 and num_kept >= 5
    engine = ScriptedEngine(length=lambda request: len(request.kept.token_ids) + 3 if request.kept else 4)
    worker = make_worker(engine)
    await worker.load(*weights(2))
    batches = await collect(worker.generate([ticket(0), ticket(1)], kept, None))
    whole = next(batch for batch in batches if batch["ticket_index"][0].as_py() == 0)
    assert [request.seed for request in engine.added] == [sample_seed(100, 1), *(sample_seed(101, i) for i in range(2))]
    assert whole["policy_versions"].to_pylist() == [[1, 1], [1] * num_kept + [2] * 3]
    assert whole["rollout_logprobs"].to_pylist() == [[-1.0] * 2, [-1.0] * num_kept + [-2.0] * 3]
    first = sample_seed(100, 1) % 100
    assert whole["completion_token_ids"][1].as_py() == [first + place for place in range(num_kept + 3)]
    assert whole["seed"].to_pylist() == [sample_seed(100, 0), sample_seed(100, 1)]


@pytest.mark.parametrize(
    ("on_update", "sampling"),
    [
        ("finish", {}),
        ("continue", {"frequency_penalty": 0.5}),
        ("continue", {"stop": ("end",)}),
        ("abort_and_resume", {"choice": ("a", "b")}),
    ],
)
async def test_a_group_that_no_other_worker_can_go_on_with_begins_anew_with_its_finished_completions(
    make_worker, on_update, sampling
):
    """Else short completions, finished first, would be kept, and long ones drawn again."""
    kept = await handed_over(make_worker, on_update=on_update, sampling=SamplingConfig(max_tokens=3, **sampling))
    assert kept is None


async def test_a_group_that_ends_while_it_is_handed_over_hands_over_nothing(make_worker):
    """It is the last of its call, so that nobody reads the call's inbox any more."""
    engine = ScriptedEngine(length=lambda request: 5)
    worker = make_worker(engine)
    await worker.load(*weights(1))
    loop, handing = asyncio.get_running_loop(), []
    asks = lambda: handing.append(asyncio.run_coroutine_threadsafe(worker.hand_over(["00000000"]), loop))
    engine.at_step = {4: asks}
    batches = await collect(worker.generate([ticket(0)]))
    (kept,) = await asyncio.wait_for(asyncio.wrap_future(handing[0]), 60)
    assert (kept is None) == bool(batches)


async def generating_for_ever(make_worker, *, num_groups: int = 1) -> tuple[RolloutWorker, asyncio.Task[list[Any]]]:
    """A worker, and a call of it. Its engine answers each hand-over at once, with one token."""
    worker = make_worker(ScriptedEngine(length=lambda request: 10**9))
    await worker.load(*weights(1))
    token = Completion(token_ids=[5], rollout_logprobs=[-1.0], policy_versions=[1], finish_reason=FinishReason.ABORTED)

    def hand_over(request_ids: list[str]) -> Future[dict[str, Completion]]:
        answered = Future[dict[str, Completion]]()
        answered.set_result({request_ids[0]: token})
        return answered

    worker._engine.hand_over = hand_over
    generating = asyncio.create_task(collect(worker.generate([ticket(index) for index in range(num_groups)])))
    while worker.progress().detail != f"{num_groups} groups":
        await asyncio.sleep(0)
    return worker, generating


async def handing_over(worker: RolloutWorker) -> asyncio.Task[list[Any]]:
    """A hand-over of the first group, of which its call has not read yet."""
    handing = asyncio.create_task(worker.hand_over(["00000000"]))
    while not worker._handed:
        await asyncio.sleep(0)
    return handing


async def test_a_hand_over_that_is_cancelled_costs_its_call_nothing_but_the_group(make_worker):
    worker, generating = await generating_for_ever(make_worker)
    handing = await handing_over(worker)
    handing.cancel()
    assert await asyncio.wait_for(generating, 60) == []


async def test_a_hand_over_of_a_call_that_is_cancelled_meanwhile_hands_over_nothing(make_worker):
    worker, generating = await generating_for_ever(make_worker)
    handing = await handing_over(worker)
    generating.cancel()
    assert await asyncio.wait_for(handing, 60) == [None]


async def test_a_group_that_is_aborted_while_it_is_handed_over_ends_once(make_worker):
    """Else its call would end without another group."""
    worker, generating = await generating_for_ever(make_worker, num_groups=2)
    handing = await handing_over(worker)
    assert await worker.abort(["00000000"]) == ["00000000"]
    assert await asyncio.wait_for(handing, 60) == [None]
    for _ in range(10):
        await asyncio.sleep(0)
    assert await worker.abort(["00000001"]) == ["00000001"]
    assert await asyncio.wait_for(generating, 60) == []


async def test_a_group_that_several_calls_hand_over_goes_to_the_first(make_worker):
    """The others waited for ever: the call of the group had ended, and read no more. The engine answers all of them at once."""
    worker, generating = await generating_for_ever(make_worker)
    found = await asyncio.wait_for(asyncio.gather(*(worker.hand_over(["00000000"]) for _ in range(3))), 60)
    assert [kept is None for (kept,) in found] == [False, True, True]
    assert await generating == []


async def test_a_group_of_which_nothing_is_sampled_hands_over_nothing(make_worker):
    worker = make_worker(ScriptedEngine())
    await worker.load(*weights(1))
    assert await worker.hand_over(["00000000"]) == [None]


@pytest.mark.parametrize("on_update", ["continue", "finish", "abort_and_resume"])
async def test_the_first_to_end_make_the_group_and_the_surplus_is_given_up(make_worker, on_update):
    """Sample 1 never ends; new weights arrive while it runs, and with `finish` they would wait for it for ever."""
    seeds = [sample_seed(100, index) for index in range(3)]
    engine = ScriptedEngine(length=lambda request: {seeds[0]: 9, seeds[1]: 10**9, seeds[2]: 4}[request.seed])
    worker = make_worker(engine, on_update=on_update)
    await worker.load(*weights(1))
    loop = asyncio.get_running_loop()
    updates = []
    engine.at_step = {2: lambda: updates.append(asyncio.run_coroutine_threadsafe(worker.load(*weights(2)), loop))}
    (batch,) = await collect(worker.generate([ticket(0, num_extra_trajectories=1)]))
    assert batch["sample_index"].to_pylist() == [0, 2]
    assert batch["seed"].to_pylist() == [seeds[0], seeds[2]]
    assert [len(tokens) for tokens in batch["completion_token_ids"].to_pylist()] == [9, 4]
    await asyncio.wait_for(asyncio.wrap_future(updates[0]), 120)
    await worker.load(*weights(3))
    assert engine.compositions[-1] == [], "nothing ran beside the last probe"


async def test_surplus_that_ends_in_the_same_step_leaves_no_row(make_worker):
    worker = make_worker(ScriptedEngine())
    await worker.load(*weights(1))
    batches = await collect(worker.generate([ticket(0, num_extra_trajectories=3), ticket(1)]))
    assert [batch["sample_index"].to_pylist() for batch in batches] == [[0, 1], [0, 1]]


async def test_a_caller_that_goes_away_takes_its_requests_along(make_worker):
    engine = ScriptedEngine()
    worker = make_worker(engine)
    await worker.load(*weights(1))
    loop, has_begun = asyncio.get_running_loop(), asyncio.Event()
    engine.at_step = {1: lambda: loop.call_soon_threadsafe(has_begun.set)}
    groups = asyncio.create_task(collect(worker.generate([ticket(0, max_tokens=10**9)])))
    await has_begun.wait()
    groups.cancel()
    await asyncio.gather(groups, return_exceptions=True)
    assert worker.progress().detail == "0 groups" and worker._inboxes == set()
    async with asyncio.timeout(60):
        while engine._running:
            await asyncio.sleep(0.01)


async def test_a_failing_engine_is_told_to_every_waiting_call_and_to_later_ones(make_worker):
    worker = make_worker(ScriptedEngine(at_step={3: fail}))
    await worker.load(*weights(1))
    calls = [collect(worker.generate([ticket(index, max_tokens=9)])) for index in range(2)]
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(outcome, WorkerError)
        assert "out of memory" in str(outcome)
    with pytest.raises(WorkerError, match="out of memory"):
        await worker.load(*weights(2))
    assert worker.progress().phase == "ended"


async def test_an_engine_that_stands_still_meets_the_deadline(make_worker):
    goes_on = threading.Event()
    worker = make_worker(ScriptedEngine(at_step={1: goes_on.wait}))
    await worker.load(*weights(1))
    worker._check_that_engine_moves()  # an engine without work is not late
    worker._timeout_s = 0.2  # not before: a busy machine may take longer to load
    try:
        with pytest.raises(DeadlineError, match="w0, sampling, policy version 1: no engine step"):
            await collect(worker.generate([ticket(0)]))
    finally:
        goes_on.set()


async def test_loaded_buckets_are_let_go(make_worker):
    worker = make_worker(ScriptedEngine())
    manifest, bucket = weights(1)
    await worker.load(manifest, bucket)
    await collect(worker.generate([ticket(0)]))
    alive = weakref.ref(bucket)
    del bucket

    def is_gone() -> bool:
        gc.collect()
        return alive() is None

    async with asyncio.timeout(60):  # the thread that checked it lets go of it soon after the check is done
        while not is_gone():
            await asyncio.sleep(0.01)


def test_a_group_whose_rows_are_written_keeps_no_tokens():
    """The call that it came with may go on for as long as the slowest group takes."""

    class Tokens(list[int]):
        """Which a weak reference can be had of."""

    formatter, asked = ChatFormatter(make_tokenizer(), max_context=64), ticket(0, num_trajectories=1)
    group = GroupInProgress(ticket=asked, encoded=formatter.encode(asked.prompt), key="0.1", decode=formatter.decode)
    ids = Tokens([5, 6])
    (request,) = group.requests()
    sampled = {"rollout_logprobs": [-1.0, -1.0], "policy_versions": [1, 1], "finish_reason": FinishReason.STOP}
    group.add(request.request_id, Completion(token_ids=ids, **sampled))
    rows = group.rows(run_id="run", worker="w0")
    assert rows[0]["completion_token_ids"] == [5, 6]
    alive = weakref.ref(ids)
    del ids, rows
    gc.collect()
    assert alive() is None


class TakesFromGroups(ScriptedEngine):
    """Its load tells what it is to load, as a number, or breaks off."""

    def __init__(self, *loads: float | BroadcastError) -> None:
        super().__init__()
        self.taken: list[Incoming] = []
        self._loads = list(loads)

    def load(self, tensors: Any) -> None:
        self.taken.append(tensors)
        load = self._loads.pop(0)
        if isinstance(load, BroadcastError):
            raise load
        self.weight = load


GROUP = RankGroup(name="g", size=3, sender="s", address="here:1", backend="gloo", timeout_s=5.0, lasts=True, digest="d")


async def test_what_a_group_brings_is_attested_as_what_is_loaded(make_worker):
    engine = TakesFromGroups(2.0, 2.0)
    worker, (manifest, _) = make_worker(engine, keeps_weights=True), weights(2)
    attestation = await worker.receive(manifest, GROUP, 2)
    assert (attestation.policy_version, attestation.digest) == (2, manifest["digest"])
    assert [(each.group, each.first_rank, each.keeps) for each in engine.taken] == [(GROUP, 2, True)]
    manifest, _ = weights(3)  # the engine still computes with the old ones
    with pytest.raises(WeightsError, match="does not compute policy version 3"):
        await worker.receive(manifest, GROUP, 2)


async def test_a_manifest_that_was_altered_is_refused_before_anything_is_received(make_worker):
    engine = TakesFromGroups()
    manifest, _ = weights(2)
    manifest["tensors"][0]["name"] = "other"
    with pytest.raises(WeightsError, match="tensor table"):
        await make_worker(engine).receive(manifest, GROUP, 2)
    assert not engine.taken


async def test_a_broadcast_that_breaks_in_the_middle_of_a_first_load_leaves_the_noise_floor_measured(make_worker):
    engine = TakesFromGroups(BroadcastError("a member is lost"), 2.0)
    worker, (manifest, _) = make_worker(engine), weights(2)
    with pytest.raises(BroadcastError):
        await worker.receive(manifest, GROUP, 1)
    assert (await worker.receive(manifest, GROUP, 1)).noise_floor == 0.0


async def test_an_engine_that_does_not_start_says_why():
    def broken():
        raise RuntimeError("no such model")

    with pytest.raises(RuntimeError, match="no such model"):
        RolloutWorker(
            name="w0",
            run_id="run",
            make_engine=broken,
            formatter=ChatFormatter(make_tokenizer(), max_context=64),
            attestor=Attestor(worker="w0", dtype="float32"),
        )


async def test_a_prompt_that_does_not_fit_is_refused_and_the_other_tickets_of_its_call_are_sampled(make_worker):
    worker = make_worker(ScriptedEngine())
    await worker.load(*weights(1))
    refusal, *batches = await collect(worker.generate([ticket(0), ticket(1, text="x" * 64), ticket(2)]))
    assert isinstance(refusal, Refusal) and (refusal.group_id, refusal.prompt_id) == ("00000001", "p1")
    assert refusal.reason.startswith("prompt 'p1' has 64 tokens, and the context takes 64")
    assert [batch["ticket_index"][0].as_py() for batch in batches] == [0, 2]


async def test_a_prompt_that_the_engine_refuses_costs_its_group_and_the_other_tickets_are_sampled(make_worker):
    engine = ScriptedEngine(
        refusal=lambda request: "too large a token id" if len(request.prompt_token_ids) > 9 else None
    )
    worker = make_worker(engine)
    await worker.load(*weights(1))
    refusal, *batches = await collect(worker.generate([ticket(0), ticket(1, text="x" * 20), ticket(2)]))
    assert refusal == Refusal(
        group_id="00000001", prompt_id="p1", reason="the engine refuses prompt 'p1': too large a token id"
    )
    assert [batch["ticket_index"][0].as_py() for batch in batches] == [0, 2]
    assert worker.progress().detail == "0 groups"


def fail():
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("is_loaded", [False, True])
async def test_a_worker_discards_its_weights_but_for_those_that_its_noise_floor_is_measured_with(
    make_worker, is_loaded: bool
):
    engine = ScriptedEngine()
    worker = make_worker(engine)
    if is_loaded:
        await worker.load(*weights(4))
    await worker.sleep(False)
    assert engine.is_asleep and (engine.weight == 0.0) == (not is_loaded), (
        "scripted weights that were discarded are NaN"
    )
    await worker.load(*weights(5))
    (batch,) = await collect(worker.generate([ticket(7)]))
    assert batch["rollout_logprobs"].to_pylist() == [[-5.0] * 3] * 2


async def test_a_worker_that_kept_its_weights_serves_them_when_it_wakes(make_worker):
    worker = make_worker(ScriptedEngine())
    await worker.load(*weights(4))
    await worker.sleep(True)
    await worker.wake()
    (batch,) = await collect(worker.generate([ticket(7)]))
    assert batch["policy_versions"].to_pylist() == [[4, 4, 4]] * 2
