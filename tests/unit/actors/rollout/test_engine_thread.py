import dataclasses
import itertools
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.rollout import engine_thread
from actors.rollout.engine_thread import EngineThread, Outcome, Update
from cluster.contracts.errors import BroadcastError, DataError, WeightsError
from cluster.contracts.protocols import EngineRequest
from cluster.contracts.sampling_config import SamplingConfig
from cluster.contracts.types import Completion, EngineUse, Proof
from tests.unit.actors.scripted_engine import ScriptedEngine

FIRST_VERSION = 1


def update(version: int, *, is_right: bool = True) -> Update:
    """Weights whose log-probs are minus their version."""

    def prove(logprobs: list[float]) -> Proof:
        if not is_right or logprobs != [-float(version)]:
            raise WeightsError(f"version {version} failed its canary")
        error = float(version)
        return Proof(
            canary_mean_error=error, canary_max_error=0.0, tolerance=error, noise_floor=0.0, distinguishable=True
        )

    tensor = np.full(1, float(version))
    return Update(policy_version=version, tensors=lambda: iter([("w", tensor)]), probe_token_ids=[1, 2], prove=prove)


def sampled(
    *, on_update: Any, new: Update, told_together: int = 1
) -> tuple[Completion | WeightsError, Future[tuple[Proof, float]], ScriptedEngine]:
    """One request of six tokens; `new` arrives while its third is sampled."""
    engine = ScriptedEngine(told_together=told_together)
    thread = EngineThread(lambda: engine, on_update=on_update)
    outcome: Future[Completion | WeightsError] = Future()
    updates: list[Future[tuple[Proof, float]]] = []
    engine.at_step = {2: lambda: updates.append(thread.update(new))}
    request = EngineRequest(request_id="r", prompt_token_ids=[5], sampling=SamplingConfig(max_tokens=6), seed=10)
    thread.update(update(FIRST_VERSION)).result(timeout=120)
    thread.submit([request], lambda request_id, result: outcome.set_result(result))
    result = outcome.result(timeout=120)
    updates[0].exception(timeout=120)
    thread.stop()
    return result, updates[0], engine


def test_continue_marks_each_token_with_the_version_that_sampled_it():
    completion, updated, _ = sampled(on_update="continue", new=update(2))
    assert completion.policy_versions == [1, 1, 1, 2, 2, 2]
    assert completion.rollout_logprobs == [-1.0, -1.0, -1.0, -2.0, -2.0, -2.0]
    assert completion.token_ids == [10, 11, 12, 13, 14, 15]
    assert updated.result()[0].canary_mean_error == 2.0


@pytest.mark.parametrize("told_together", [2, 4, 100])
@pytest.mark.parametrize("on_update", ["continue", "abort_and_resume"])
def test_tokens_that_the_engine_kept_back_are_of_the_version_that_sampled_them(on_update, told_together):
    completion, _, _ = sampled(on_update=on_update, new=update(2), told_together=told_together)
    assert completion.token_ids == [10, 11, 12, 13, 14, 15]
    assert completion.policy_versions == [1, 1, 1, 2, 2, 2]
    assert completion.rollout_logprobs == [-1.0, -1.0, -1.0, -2.0, -2.0, -2.0]


@pytest.mark.parametrize("told_together", [1, 100])
@pytest.mark.parametrize("on_update", ["continue", "abort_and_resume"])
def test_a_token_sampled_beside_a_probe_is_of_its_version_though_the_next_update_follows_at_once(
    on_update, told_together
):
    engine = ScriptedEngine(told_together=told_together)
    thread = EngineThread(lambda: engine, on_update=on_update)
    outcome: Future[Outcome] = Future()
    engine.at_step = {2: lambda: [thread.update(update(version)) for version in (2, 3)]}
    request = EngineRequest(request_id="r", prompt_token_ids=[5], sampling=SamplingConfig(max_tokens=6), seed=10)
    thread.update(update(FIRST_VERSION)).result(timeout=120)
    thread.submit([request], lambda request_id, result: outcome.set_result(result))
    completion = outcome.result(timeout=120)
    thread.stop()
    assert isinstance(completion, Completion)
    assert completion.token_ids == [10, 11, 12, 13, 14, 15]
    assert [-float(version) for version in completion.policy_versions] == completion.rollout_logprobs
    if on_update == "continue":  # else nothing runs beside a probe
        assert completion.policy_versions == [1, 1, 1, 2, 3, 3]


def test_tokens_that_the_engine_kept_back_are_handed_over():
    engine = ScriptedEngine(told_together=4)
    thread = EngineThread(lambda: engine, on_update="continue")
    handed_over: Future[Future[dict[str, Completion]]] = Future()
    engine.at_step = {2: lambda: handed_over.set_result(thread.hand_over(["r"]))}
    request = EngineRequest(request_id="r", prompt_token_ids=[5], sampling=SamplingConfig(max_tokens=6), seed=10)
    thread.update(update(FIRST_VERSION)).result(timeout=120)
    thread.submit([request], lambda request_id, result: None)
    assert handed_over.result(timeout=120).result(timeout=120)["r"].token_ids == [10, 11, 12]
    thread.stop()


def test_how_full_the_engine_was_is_told_under_two_weights_and_then_forgotten():
    engine = ScriptedEngine()
    thread = EngineThread(lambda: engine, on_update="continue")
    ended: list[Future[None]] = [Future(), Future()]
    requests = [
        EngineRequest(request_id=str(place), prompt_token_ids=[5], sampling=SamplingConfig(max_tokens=2), seed=1)
        for place in range(2)
    ]
    thread.update(update(FIRST_VERSION)).result(timeout=120)
    thread.submit(requests, lambda request_id, _: ended[int(request_id)].set_result(None))
    for each in ended:
        each.result(timeout=120)
    uses = []
    for version in (2, 3, 4):
        thread.update(update(version)).result(timeout=120)
        uses.append(thread.most_used)
    thread.stop()
    assert uses == [EngineUse(num_running=2, cache_share=0.02), EngineUse(), EngineUse()]


def test_finish_ends_running_requests_under_the_old_version():
    completion, updated, _ = sampled(on_update="finish", new=update(2))
    assert completion.policy_versions == [1] * 6
    assert updated.result()[0].canary_mean_error == 2.0


@pytest.mark.parametrize("on_update", ["continue", "finish", "abort_and_resume"])
def test_after_a_load_that_broke_off_nothing_is_sampled_and_requests_wait_for_the_next_one(on_update):
    engine = ScriptedEngine()
    thread = EngineThread(lambda: engine, on_update=on_update)
    outcomes: dict[str, Future[Outcome]] = {name: Future() for name in ("first", "second")}
    broken: Future[Future[tuple[Proof, float]]] = Future()

    def submit(name: str) -> None:
        request = EngineRequest(request_id=name, prompt_token_ids=[5], sampling=SamplingConfig(max_tokens=4), seed=10)
        thread.submit([request], lambda request_id, result: outcomes[request_id].set_result(result))

    def breaks_off() -> Any:
        yield "w", np.full(1, 2.0)
        raise BroadcastError("a member is lost")

    torn = dataclasses.replace(update(2), tensors=breaks_off)
    engine.at_step = {1: lambda: broken.set_result(thread.update(torn))}
    thread.update(update(FIRST_VERSION)).result(timeout=120)
    submit("first")
    assert isinstance(broken.result(timeout=120).exception(timeout=120), BroadcastError)
    assert thread.policy_version is None
    submit("second")
    num_steps = len(engine.compositions)
    assert isinstance(thread.update(torn).exception(timeout=120), BroadcastError)
    assert len(engine.compositions) == num_steps, "nothing was sampled meanwhile"
    thread.update(update(3)).result(timeout=120)
    first, second = (outcomes[name].result(timeout=120) for name in ("first", "second"))
    thread.stop()
    assert isinstance(first, Completion) and isinstance(second, Completion)
    assert first.policy_versions == ([1] * 4 if on_update == "finish" else [1, 1, 3, 3])
    assert second.policy_versions == [3] * 4


def test_requests_that_come_while_an_update_waits_are_sampled_under_the_new_weights():
    """Two updates wait, each with a request behind it."""
    engine = ScriptedEngine()
    thread = EngineThread(lambda: engine, on_update="finish")
    outcomes: dict[str, Future[Outcome]] = {name: Future() for name in ("first", "second", "third")}

    def submit(name: str) -> None:
        request = EngineRequest(request_id=name, prompt_token_ids=[5], sampling=SamplingConfig(max_tokens=4), seed=10)
        thread.submit([request], lambda request_id, result: outcomes[request_id].set_result(result))

    def update_twice() -> None:
        for version, name in ((2, "second"), (3, "third")):
            thread.update(update(version))
            submit(name)

    engine.at_step = {1: update_twice}
    thread.update(update(FIRST_VERSION)).result(timeout=120)
    submit("first")
    found = [outcome.result(timeout=120) for outcome in outcomes.values()]
    thread.stop()
    assert [each.policy_versions for each in found if isinstance(each, Completion)] == [[1] * 4, [2] * 4, [3] * 4]


def test_progress_is_the_beginning_of_sampling_and_then_each_step(monkeypatch):
    clock = SimpleNamespace(time=itertools.count(1.0).__next__, monotonic=time.monotonic)
    monkeypatch.setattr(engine_thread, "time", clock)
    engine, outcome, seen = ScriptedEngine(), Future[Outcome](), list[float]()
    thread = EngineThread(lambda: engine, on_update="continue")
    thread.update(update(FIRST_VERSION)).result(timeout=120)
    engine.at_step = {step: lambda: seen.append(thread.last_progress) for step in range(3)}
    request = EngineRequest(request_id="r", prompt_token_ids=[5], sampling=SamplingConfig(max_tokens=4), seed=10)
    before = clock.time()
    thread.submit([request], lambda request_id, result: outcome.set_result(result))
    outcome.result(timeout=120)
    thread.stop()
    assert before < seen[0] < seen[1] < seen[2]


def test_requests_given_up_while_they_wait_behind_an_update_never_run():
    engine = ScriptedEngine()
    thread = EngineThread(lambda: engine, on_update="finish")
    first: Future[Completion | WeightsError] = Future()
    requests = {
        name: EngineRequest(request_id=name, prompt_token_ids=[5], sampling=SamplingConfig(max_tokens=4), seed=10)
        for name in ("first", "second")
    }

    def submit_and_give_up() -> None:
        thread.update(update(2))
        thread.submit([requests["second"]], lambda request_id, result: None)
        thread.abort(["second"])

    engine.at_step = {1: submit_and_give_up}
    thread.update(update(FIRST_VERSION)).result(timeout=120)
    thread.submit([requests["first"]], lambda request_id, result: first.set_result(result))
    assert first.result(timeout=120).policy_versions == [1] * 4
    thread.update(update(3)).result(timeout=120)
    assert not any("second" in running for running in engine.compositions)
    thread.stop()


def test_abort_and_resume_keeps_tokens_and_samples_the_rest_anew():
    completion, _, engine = sampled(on_update="abort_and_resume", new=update(2))
    assert engine.added[-1].kept == Completion(
        token_ids=[10, 11, 12],
        rollout_logprobs=[-1.0] * 3,
        policy_versions=[1] * 3,
        finish_reason="aborted",
    )
    assert completion.policy_versions == [1, 1, 1, 2, 2, 2]
    assert completion.token_ids == [10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize("on_update", ["continue", "abort_and_resume"])
def test_no_token_of_unattested_weights_leaves(on_update):
    outcome, updated, _ = sampled(on_update=on_update, new=update(2, is_right=False))
    assert isinstance(outcome, WeightsError)
    assert isinstance(updated.exception(), WeightsError)


def test_a_request_that_the_engine_refuses_ends_alone_and_the_others_go_on():
    """An update that waits for all requests does not wait for it."""
    engine = ScriptedEngine(refusal=lambda request: "token id 9 is unknown" if 9 in request.prompt_token_ids else None)
    thread = EngineThread(lambda: engine, on_update="finish")
    outcomes: dict[str, Future[Outcome]] = {"bad": Future(), "good": Future()}
    requests = [
        EngineRequest(request_id=name, prompt_token_ids=[token], sampling=SamplingConfig(max_tokens=2), seed=10)
        for name, token in (("bad", 9), ("good", 5))
    ]
    thread.update(update(FIRST_VERSION)).result(timeout=120)
    thread.submit(requests, lambda request_id, outcome: outcomes[request_id].set_result(outcome))
    refused = outcomes["bad"].result(timeout=120)
    assert isinstance(refused, DataError) and str(refused) == "token id 9 is unknown"
    assert outcomes["good"].result(timeout=120).token_ids == [10, 11]
    thread.update(update(2)).result(timeout=120)
    thread.stop()


def test_the_last_token_may_be_sampled_beside_the_probe():
    engine = ScriptedEngine()
    thread = EngineThread(lambda: engine, on_update="continue")
    outcome: Future[Completion | WeightsError] = Future()
    thread.update(update(FIRST_VERSION)).result(timeout=120)
    engine.at_step = {1: lambda: thread.update(update(2))}
    request = EngineRequest(request_id="r", prompt_token_ids=[5], sampling=SamplingConfig(max_tokens=3), seed=10)
    thread.submit([request], lambda request_id, result: outcome.set_result(result))
    assert outcome.result(timeout=120).policy_versions == [1, 1, 2]
    thread.stop()


# Sleep


def asleep(thread: EngineThread, engine: ScriptedEngine, *, keeps_weights: bool) -> Future[Outcome]:
    """The outcome of a request of six tokens; the engine fell asleep after its third, under version 1."""
    outcome: Future[Outcome] = Future()
    slept: Future[Future[None]] = Future()
    engine.at_step = {2: lambda: slept.set_result(thread.sleep(keeps_weights=keeps_weights))}
    request = EngineRequest(request_id="r", prompt_token_ids=[5], sampling=SamplingConfig(max_tokens=6), seed=10)
    thread.update(update(FIRST_VERSION)).result(timeout=120)
    thread.submit([request], lambda request_id, result: outcome.set_result(result))
    slept.result(timeout=120).result(timeout=120)
    assert engine.is_asleep and not outcome.done()
    return outcome


@pytest.mark.parametrize("told_together", [1, 100])
def test_a_request_goes_on_where_it_was_when_the_engine_wakes(told_together):
    engine = ScriptedEngine(told_together=told_together)
    thread = EngineThread(lambda: engine, on_update="continue")
    outcome = asleep(thread, engine, keeps_weights=True)
    assert thread.policy_version == 1
    thread.wake().result(timeout=120)
    completion = outcome.result(timeout=120)
    thread.stop()
    assert isinstance(completion, Completion)
    assert completion.token_ids == [10, 11, 12, 13, 14, 15] and completion.policy_versions == [1] * 6
    kept = engine.added[-1].kept
    assert kept is not None and kept.token_ids == [10, 11, 12], "nothing is sampled twice"


def test_a_request_that_may_not_resume_begins_anew_when_the_engine_wakes():
    """What counts a completion's own tokens would take the first ones for the prompt's."""
    engine = ScriptedEngine()
    thread = EngineThread(lambda: engine, on_update="continue", may_resume=False)
    outcome = asleep(thread, engine, keeps_weights=False)
    thread.update(update(2)).result(timeout=120)
    completion = outcome.result(timeout=120)
    thread.stop()
    assert isinstance(completion, Completion)
    assert completion.token_ids == [10, 11, 12, 13, 14, 15] and completion.policy_versions == [2] * 6


@pytest.mark.parametrize("on_update", ["continue", "finish", "abort_and_resume"])
def test_an_engine_without_its_weights_serves_nothing_until_an_update_wakes_it(on_update):
    engine = ScriptedEngine()
    thread = EngineThread(lambda: engine, on_update=on_update)
    outcome = asleep(thread, engine, keeps_weights=False)
    thread.wake().result(timeout=120)
    assert engine.is_asleep and thread.policy_version is None and not outcome.done()
    thread.update(update(2)).result(timeout=120)
    completion = outcome.result(timeout=120)
    thread.stop()
    assert isinstance(completion, Completion)
    assert completion.rollout_logprobs == [-1.0, -1.0, -1.0, -2.0, -2.0, -2.0]


@pytest.mark.parametrize("on_update", ["continue", "finish", "abort_and_resume"])
def test_an_update_wakes_an_engine_that_kept_its_weights_and_waits_for_no_request(on_update):
    engine = ScriptedEngine()
    thread = EngineThread(lambda: engine, on_update=on_update)
    outcome = asleep(thread, engine, keeps_weights=True)
    thread.update(update(2)).result(timeout=60)
    completion = outcome.result(timeout=120)
    thread.stop()
    assert isinstance(completion, Completion)
    assert completion.rollout_logprobs == [-1.0, -1.0, -1.0, -2.0, -2.0, -2.0]


def test_a_request_that_comes_while_the_engine_sleeps_waits_for_it():
    engine, outcome = ScriptedEngine(), Future[Outcome]()
    thread = EngineThread(lambda: engine, on_update="continue")
    thread.update(update(FIRST_VERSION)).result(timeout=120)
    thread.sleep(keeps_weights=True).result(timeout=120)
    request = EngineRequest(request_id="r", prompt_token_ids=[5], sampling=SamplingConfig(max_tokens=2), seed=10)
    thread.submit([request], lambda request_id, result: outcome.set_result(result))
    thread.sleep(keeps_weights=True).result(timeout=120)
    now = time.time()
    assert engine.added == [] and thread.last_progress >= now, "an engine that sleeps is not one that makes no progress"
    thread.wake().result(timeout=120)
    completion = outcome.result(timeout=120)
    thread.stop()
    assert isinstance(completion, Completion) and completion.token_ids == [10, 11]


def test_a_probe_of_starting_weights_wakes_the_engine():
    engine = ScriptedEngine()
    thread = EngineThread(lambda: engine, on_update="continue")
    thread.sleep(keeps_weights=True).result(timeout=120)
    assert thread.probe([1, 2]).result(timeout=120) == [0.0]
    thread.stop()


def test_an_engine_whose_load_broke_off_sleeps_again():
    """It is half awake then, and the learner needs the memory."""

    def broken() -> Any:
        raise BroadcastError("a member is lost")

    engine = ScriptedEngine()
    thread = EngineThread(lambda: engine, on_update="continue")
    thread.update(update(FIRST_VERSION)).result(timeout=120)
    thread.sleep(keeps_weights=False).result(timeout=120)
    with pytest.raises(BroadcastError):
        thread.update(dataclasses.replace(update(2), tensors=broken)).result(timeout=120)
    engine.wake()
    thread.sleep(keeps_weights=False).result(timeout=120)
    assert engine.is_asleep
    thread.update(update(2)).result(timeout=120)
    assert thread.policy_version == 2
    thread.stop()
