"""New weights into a running vLLM: exact for tied and untied models, attested, and never served when they are wrong."""

import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ApertusConfig, ApertusForCausalLM

from cluster.contracts.errors import BroadcastError, WeightsError
from cluster.contracts.protocols import EngineOutput
from cluster.contracts.types import Completion, FinishReason, Prompt, RankGroup
from cluster.weights.process_group import Incoming, Member, Sender
from learner.publishing import exported
from tests.integration.commands import Background
from tests.integration.engines import (
    PROBE,
    Reference,
    completion,
    end,
    kept_by,
    largest_error,
    mean_error,
    published,
    request,
    run,
    start_engine,
    start_worker,
    ticket,
)
from tests.integration.faults import Run, stand_still_in_mid_broadcast, until, write_endless_run
from tests.models import make_tiny_model, save_model

pytestmark = pytest.mark.engine


async def collect(batches: AsyncIterator[Any]) -> list[Any]:
    return [batch async for batch in batches]


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma3", "qwen3_moe"])
@pytest.mark.parametrize("tied", [True, False])
def test_ten_updates_leave_engine_and_learner_in_agreement(tmp_path, architecture, tied):
    path = make_tiny_model(tmp_path, tied=tied, architecture=architecture)
    is_mixture = architecture == "qwen3_moe"
    engine, reference = start_engine(path, routing_replay=is_mixture), Reference(path)
    for number in range(10):
        reference.perturb(seed=number)
        stale = engine.prompt_logprobs(PROBE)
        engine.load(iter(reference.named_parameters()))
        assert mean_error(stale, reference.logprobs(PROBE)) > 0.05
    assert largest_error(engine.prompt_logprobs(PROBE), reference.logprobs(PROBE)) < 1e-4
    prompt = PROBE[:8]
    for temperature in (0.0, 1.0):
        found = run(engine, *(request(f"r{i}", prompt, seed=i, temperature=temperature) for i in range(4)))
        for one in found.values():
            expected = reference.logprobs([*prompt, *one.token_ids])[len(prompt) - 1 :]
            assert largest_error(one.rollout_logprobs, expected) < 1e-4
            if is_mixture:
                assert recorded_experts(one, prompt).equal(reference.experts([*prompt, *one.token_ids[:-1]]))


def test_an_update_leaves_the_buffers_of_a_layer_as_its_files_have_them(tmp_path):
    """Apertus's activation has two beside its parameters. vLLM makes the layer anew, and what it is not given is memory as it was found."""
    rotation = {"rope_type": "default", "rope_theta": 10_000.0}
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = ApertusConfig(
        vocab_size=128, max_position_embeddings=256, initializer_range=0.2, rope_parameters=rotation, **shape
    )
    path = save_model(lambda: ApertusForCausalLM(config), tmp_path, dtype="float32")
    engine, reference = start_engine(path), Reference(path)
    for number in range(2):
        reference.perturb(seed=number)
        engine.load(exported(reference.model, dtype=torch.float32))
        # vLLM has this activation's numbers in bfloat16.
        assert mean_error(engine.prompt_logprobs(PROBE), reference.logprobs(PROBE)) < 0.02


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_head_computes_with_the_packed_copy_that_vllm_makes_of_the_embedding(tmp_path, dtype):
    if torch.cuda.is_available():
        pytest.skip("a GPU's engine packs no embedding")
    path = make_tiny_model(tmp_path, tied=True, dtype=dtype)
    engine, reference = start_engine(path, dtype=dtype), Reference(path)
    for number in range(2):
        reference.perturb(seed=number)
        engine.load(iter(reference.named_parameters()))
        (shares,) = engine._engine.collective_rpc(lambda worker: _shares_head(worker.model_runner.get_model()))
        assert shares


def _shares_head(model: Any) -> bool:
    return (
        model.lm_head is not model.model.embed_tokens
        and model.lm_head.cpu_linear is model.model.embed_tokens.cpu_linear
    )


def recorded_experts(completion: Completion, prompt: list[int]) -> torch.Tensor:
    """Of a model with two layers and two experts a token, in ascending order: [positions, layers, experts per token]."""
    assert completion.routed_experts is not None
    flat = torch.frombuffer(bytearray(completion.routed_experts), dtype=torch.uint8).long()
    return flat.view(len(prompt) + len(completion.token_ids) - 1, 2, 2).sort(-1).values


def test_experts_are_recorded_from_the_cache_after_an_interruption_and_under_the_weights_that_chose_them(tmp_path):
    path = make_tiny_model(tmp_path, architecture="qwen3_moe")
    engine, reference = start_engine(path, routing_replay=True), Reference(path)
    prompt = (PROBE * 2)[:48]  # three blocks of the cache

    def check(found: dict[str, Completion], prompt: list[int]) -> None:
        for one in found.values():
            assert recorded_experts(one, prompt).equal(reference.experts([*prompt, *one.token_ids[:-1]]))

    first = run(engine, *(request(f"r{i}", prompt, seed=i) for i in range(4)))
    check(first, prompt)
    check(run(engine, request("cached", prompt, seed=4)), prompt)
    later = [*prompt, *first["r0"].token_ids, 5, 6, 7]
    check(run(engine, request("second turn", later, seed=5)), later)
    for name in ("given up", "resumed"):
        engine.add(request(name, prompt, seed=6))
    told = [*(output for _ in range(6) for output in engine.step()), *engine.flush()]
    tokens = [token for output in told if output.request_id == "resumed" for token in output.token_ids]
    assert len(tokens) == 6
    engine.abort(["given up", "resumed"])
    kept = completion(tokens, [0.0] * len(tokens), reason=FinishReason.ABORTED)
    check(run(engine, request("goes on", prompt, seed=6, kept=kept)), [*prompt, *tokens])
    reference.perturb(seed=1)
    engine.load(iter(reference.named_parameters()))
    check(run(engine, request("under new weights", prompt, seed=7)), prompt)


async def test_a_model_with_another_shape_is_refused_by_name_and_right_weights_are_loaded_after_it(tmp_path):
    path = make_tiny_model(tmp_path / "served", tied=True)
    other = Reference(make_tiny_model(tmp_path / "published", tied=True, hidden_size=96))
    reference = Reference(path)
    other.starting_logprobs = reference.starting_logprobs
    worker = start_worker(path)
    with pytest.raises(WeightsError, match="start from the same model"):
        await worker.load(*published(other, version=0))
    await worker.load(*published(reference, version=0))  # the canary is right
    worker.stop()


async def test_an_update_in_flight_is_seen_by_tokens_and_never_by_the_prefix_cache(tmp_path):
    path = make_tiny_model(tmp_path, tied=True)
    engine, reference = start_engine(path), Reference(path)
    # Long enough for whole cache blocks, so that later requests would find the old weights' keys and values.
    prompt = (PROBE * 2)[:48]
    for i in range(4):
        engine.add(request(f"old{i}", prompt, seed=i, max_tokens=40))
    for _ in range(5):
        engine.step()
    reference.perturb(seed=1)
    engine.load(iter(reference.named_parameters()))
    for i in range(4):
        engine.add(request(f"new{i}", prompt, seed=i, max_tokens=8))
    new: dict[str, tuple[list[int], list[float]]] = {f"new{i}": ([], []) for i in range(4)}
    ended: set[str] = set()
    while len(ended) < 8:
        for output in engine.step():
            if output.request_id in new:
                new[output.request_id][0].extend(output.token_ids)
                new[output.request_id][1].extend(output.logprobs)
            if output.finish_reason:
                ended.add(output.request_id)
    for token_ids, logprobs in new.values():
        assert largest_error(logprobs, reference.logprobs([*prompt, *token_ids])[len(prompt) - 1 :]) < 1e-4


def test_a_request_that_waits_for_room_in_the_cache_begins_under_the_new_weights_alone(tmp_path):
    path = make_tiny_model(tmp_path, tied=True)
    # Seven blocks of 128 tokens: of eight requests with slots, five have room beside their common prompt.
    engine = start_engine(path, max_concurrent_sequences=8, kv_cache_bytes=7 * 2**17)
    reference, prompt = Reference(path), (PROBE * 5)[:130]
    tokens: dict[str, list[int]] = {}
    logprobs: dict[str, list[float]] = {}

    def take(outputs: list[EngineOutput]) -> int:
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            logprobs.setdefault(output.request_id, []).extend(output.logprobs)
        return sum(output.finish_reason is not None for output in outputs)

    names = [f"r{i}" for i in range(10)]
    for i, name in enumerate(names):
        engine.add(request(name, prompt, seed=i, max_tokens=40, ignore_eos=True))
    for _ in range(10):
        take(engine.step())
    began_before = [*tokens]
    assert engine.use().num_waiting == 8 - len(began_before) > 0
    reference.perturb(seed=1)
    engine.load(iter(reference.named_parameters()))
    num_ended = 0
    while num_ended < 10:
        num_ended += take(engine.step())
    assert [*tokens] == names, "the order in which they came"
    for name in names[len(began_before) :]:
        assert largest_error(logprobs[name], reference.logprobs([*prompt, *tokens[name]])[129:]) < 1e-4


async def test_a_prompt_without_a_template_begins_with_one_bos_and_its_tokens_carry_their_version(tmp_path):
    path = make_tiny_model(tmp_path, architecture="gemma3", adds_bos=True, pad_is_eos=True)
    worker, reference = start_worker(path), Reference(path)
    for version in range(3):
        await worker.load(*published(reference, version=version))
        reference.perturb(seed=version)
    prompt = Prompt(prompt_id="p", messages=[{"role": "user", "content": "1+1="}])
    (batch,) = await collect(worker.generate([ticket(0, prompt)]))
    worker.stop()
    assert batch["prompt_token_ids"][0].as_py()[:2] == [0, 5], "one bos in front"
    assert batch["policy_versions"].to_pylist() == [
        [2] * len(tokens) for tokens in batch["completion_token_ids"].to_pylist()
    ]


async def test_one_call_gives_the_same_batches_bit_for_bit(tmp_path):
    path = make_tiny_model(tmp_path, tied=True)
    worker, reference = start_worker(path), Reference(path)
    tickets = [ticket(index, Prompt(prompt_id=f"p{index}", text=f"{index}+1=")) for index in range(6)]
    runs = []
    for _ in range(2):
        await worker.load(*published(reference, version=0))
        batches = await collect(worker.generate(tickets))
        batches.sort(key=lambda batch: batch["ticket_index"][0].as_py())
        runs.append(
            [batch.select(["completion_token_ids", "rollout_logprobs", "completion_text", "seed"]) for batch in batches]
        )
    worker.stop()
    assert runs[0] == runs[1]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_processes_of_an_engine_take_weights_from_a_group_and_again_when_it_broke_in_the_middle(
    tmp_path, monkeypatch, num_processes
):
    if num_processes > 1:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, range(num_processes))))
    path = make_tiny_model(tmp_path, tied=True)
    engine, reference = start_engine(path, tensor_parallel_size=num_processes), Reference(path)
    sender = Sender("127.0.0.1", device=torch.device("cpu"))

    def incoming(seed: int, *, name: str) -> Incoming:
        reference.perturb(seed=seed)
        return kept_by(sender, reference, version=seed, name=name, num_receivers=num_processes)

    def load(weights: Incoming, send: Any) -> None:
        with ThreadPoolExecutor(1) as thread:
            sending = thread.submit(send, weights.group)
            engine.load(weights)
            sending.result()

    for seed in range(2):
        load(incoming(seed, name="whole"), sender.send)
        assert largest_error(engine.prompt_logprobs(PROBE), reference.logprobs(PROBE)) < 1e-4
    with pytest.raises(BroadcastError, match="group broken"):
        load(incoming(2, name="broken"), lambda group: _send_half(sender, group))
    load(incoming(3, name="again"), sender.send)
    assert largest_error(engine.prompt_logprobs(PROBE), reference.logprobs(PROBE)) < 1e-4
    sender.close()
    end(engine)


def _send_half(sender: Sender, group: RankGroup) -> None:
    member = Member(group, rank=0, device=torch.device("cpu"))
    buckets = sender._kept[group.digest, None]
    for bucket in buckets[: len(buckets) // 2]:
        member.finish(member.start(torch.from_numpy(bucket)))
    sender.give_up(group)
    member.leave()


@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_in_mid_broadcast_the_learner_dies_and_all_workers_serve_its_version_again(tmp_path):
    """A worker that stands still holds the broadcast up. The learner is the sender, and learns the next step or waits for its groups. In
    test_deltas.py the worker dies."""
    with _two_workers_over_groups(tmp_path) as (run, driver):
        earlier = run.events("failure")
        stand_still_in_mid_broadcast(run, "rollout-1", while_newer="learner-0", process=driver)
        held = run.num_steps()
        assert run.strike("learner-0")
        assert run.strike("rollout-1", signal.SIGCONT)
        until(lambda: run.has_recovered("learner-0"), process=driver)
        until(lambda: run.num_steps() >= held + 4, process=driver)
        driver.press_ctrl_c()
        assert driver.exit_code() == 130, driver.output
    failures = run.events("failure")[len(earlier) :]
    assert [event["actor"] for event in failures] == ["learner-0"], [event["reason"] for event in failures]
    sent = [(event["policy_version"], event["num_workers"]) for event in run.events("broadcast")]
    assert sent[-1][1] == 2 and sorted(sent) == sent
    assert sorted(run.metrics()) == list(range(1, max(run.metrics()) + 1)), "every step has its line"
    assert run.problems() == ()


@contextlib.contextmanager
def _two_workers_over_groups(folder: Path) -> Iterator[tuple[Run, Background]]:
    """A run without end and its driver, from when both workers sample. Who stands still in it is the test's to kill."""
    file = write_endless_run(
        folder,
        make_tiny_model(folder / "model"),
        rollout__num_workers=2,
        rollout__cpus_per_worker=0.4,
        weights={"transport": "collective"},
        supervision={"heartbeat_s": 1, "hang_s": 600},
    )
    run = Run(folder / "run")
    with run.start(file) as driver:
        until(lambda: run.num_steps() >= 2 and {"rollout-0", "rollout-1"} <= run.samplers(), process=driver)
        yield run, driver
