"""vLLM in this process does what the Engine protocol says: sampling, log-probs, stops, aborts, resumed requests."""

import pytest

from cluster.contracts.errors import ConfigError
from cluster.contracts.types import FinishReason, SamplingParams
from tests.integration.engines import PROBE, Reference, completion, largest_error, request, run, start_engine
from tests.models import make_tiny_model, make_tokenizer

pytestmark = pytest.mark.engine

PROMPT = PROBE[:8]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), tied=True, pad_is_eos=True)


@pytest.fixture(scope="module")
def engine(path):
    return start_engine(path, stop=("7",), max_concurrent_sequences=4)


@pytest.fixture(scope="module")
def reference(path):
    return Reference(path)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_sampled_logprobs_are_those_of_the_full_softmax_after_temperature(engine, reference, temperature):
    found = run(engine, *(request(f"r{i}", PROMPT, seed=i, temperature=temperature) for i in range(4)))
    for one in found.values():
        # Greedy tokens have the log-probs of temperature 1.
        expected = reference.logprobs([*PROMPT, *one.token_ids], temperature=temperature or 1.0)[len(PROMPT) - 1 :]
        assert largest_error(one.rollout_logprobs, expected) < 1e-4


def test_equal_requests_give_equal_tokens_bit_for_bit(engine):
    requests = [request(f"r{i}", PROMPT, seed=i) for i in range(4)]
    assert run(engine, *requests) == run(engine, *requests)


def test_more_requests_than_slots_wait_their_turn(engine):
    found = run(engine, *(request(f"r{i}", PROMPT, seed=i, max_tokens=4) for i in range(11)))
    assert len(found) == 11


def test_an_end_of_sequence_token_ends_the_completion_and_stays_in_it(engine):
    eos = make_tokenizer().eos_token_id
    found = run(engine, *(request(f"r{i}", PROMPT, seed=i, max_tokens=200) for i in range(16)))
    stopped = [one for one in found.values() if one.finish_reason is FinishReason.STOP]
    assert stopped
    assert all(one.token_ids[-1] == eos and eos not in one.token_ids[:-1] for one in stopped)


def test_a_stop_string_ends_the_completion(engine):
    seven = make_tokenizer()("7").input_ids[0]
    found = run(engine, *(request(f"r{i}", PROMPT, seed=i, max_tokens=200, stop=("7",)) for i in range(8)))
    assert any(one.token_ids[-1] == seven for one in found.values())
    assert all(seven not in one.token_ids[:-1] for one in found.values())


def test_an_aborted_request_says_no_more(engine):
    for name in ("keep", "drop", "waiting1", "waiting2", "waiting3"):
        engine.add(request(name, PROMPT, max_tokens=4))
    engine.step()
    engine.abort(["drop", "waiting3", "unknown"])
    seen = {output.request_id for _ in range(12) for output in engine.step()}
    assert seen == {"keep", "waiting1", "waiting2"}


def test_a_request_that_vllm_does_not_take_is_an_output_with_the_reason_and_the_others_go_on(engine):
    for bad in (request("unknown", [*PROMPT, 10**6]), request("long", PROMPT * 1000), request("empty", [])):
        engine.add(bad)
    engine.add(request("good", PROMPT, max_tokens=4))
    outputs = [output for _ in range(4) for output in engine.step()]
    refusals = {output.request_id: output.refusal for output in outputs if output.refusal}
    assert refusals.keys() == {"unknown", "long", "empty"}
    assert refusals["unknown"].startswith("token id 1000000 is not in the model's vocabulary of ")
    assert "longer than the maximum model length" in refusals["long"]
    assert [output.request_id for output in outputs if not output.refusal] == ["good"] * 4


def test_a_resumed_request_goes_on_after_its_kept_tokens(engine, reference):
    whole = run(engine, request("whole", PROMPT, seed=3, max_tokens=12))["whole"]
    kept = completion(whole.token_ids[:5], whole.rollout_logprobs[:5], reason=FinishReason.ABORTED)
    rest = run(engine, request("rest", PROMPT, seed=3, max_tokens=12, kept=kept))["rest"]
    assert len(rest.token_ids) == 7
    expected = reference.logprobs([*PROMPT, *kept.token_ids, *rest.token_ids])[len(PROMPT) + 4 :]
    assert largest_error(rest.rollout_logprobs, expected) < 1e-4


def test_the_canary_does_not_wait_for_full_slots_and_loses_no_tokens(engine, reference):
    undisturbed = run(engine, *(request(f"r{i}", PROMPT, seed=i, max_tokens=30) for i in range(6)))
    for i in range(6):
        engine.add(request(f"r{i}", PROMPT, seed=i, max_tokens=30))
    first = engine.step()
    assert largest_error(engine.prompt_logprobs(PROBE), reference.logprobs(PROBE)) < 1e-4
    tokens = {f"r{i}": [] for i in range(6)}
    for output in first:
        tokens[output.request_id] += output.token_ids
    num_finished = 0
    while num_finished < 6:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            num_finished += output.finish_reason is not None
    assert tokens == {name: one.token_ids for name, one in undisturbed.items()}


def test_an_idle_engine_steps_to_nothing(engine):
    assert engine.step() == []


def test_stop_strings_need_an_engine_that_was_told_of_them(path):
    engine = start_engine(path)
    with pytest.raises(ConfigError, match=r"name them in sampling\.stop"):
        engine.add(request("r", PROMPT, stop=("7",)))
    assert SamplingParams(max_tokens=1).stop == ()
