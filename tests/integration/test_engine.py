"""vLLM in this process does what the Engine protocol says: sampling, log-probs, stops, aborts, resumed requests."""

import dataclasses
import re

import pytest
import torch

from actors.rollout.drawing import token_at
from cluster.contracts.config import ModelConfig, SamplingConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.types import EngineUse, FinishReason
from learner.model.policy import load, prove, score, token_row
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


TRUNCATED = [
    {"top_k": 5},
    {"top_p": 0.3},
    {"min_p": 0.6},
    {"temperature": 0.7, "min_p": 0.1, "top_k": 30, "top_p": 0.8},
]


@pytest.mark.parametrize("sampling", TRUNCATED)
def test_the_learner_computes_the_log_probs_of_the_distribution_that_was_truncated(engine, path, reference, sampling):
    found = [*run(engine, *(request(f"r{i}", PROMPT, seed=i, **sampling) for i in range(8))).values()]
    model = ModelConfig(path=str(path), dtype="float32")
    weights = load(model, dtype=torch.float32)
    policy = prove(weights, model=model, packing="auto", sampling=SamplingConfig(**sampling), head_chunk_tokens=16)
    rows = [token_row(PROMPT, one.token_ids) for one in found]
    expected = score(lambda batch: policy(batch).logprobs_C, rows, layout=policy.layout, max_tokens=10**6)
    for one, expected_C in zip(found, expected, strict=True):
        assert largest_error(one.rollout_logprobs, expected_C.tolist()) < 1e-4
        full = reference.logprobs([*PROMPT, *one.token_ids], temperature=sampling.get("temperature", 1.0))
        gained = [a - b for a, b in zip(one.rollout_logprobs, full[len(PROMPT) - 1 :], strict=True)]
        assert min(gained) > 0.05  # the kept tokens have the probability of the dropped ones too


EOS = make_tokenizer().eos_token_id


def biased(logits_V, sampled):
    logits_V[20] += 4.0


def held_back(logits_V, sampled):
    logits_V[EOS] = -torch.inf if len(sampled) < 6 else logits_V[EOS]


def penalised(logits_V, sampled):
    for token in set(sampled):
        logits_V[token] -= 1.5 + 0.5 * sampled.count(token)


@pytest.mark.parametrize(
    ("sampling", "shape"),
    [
        ({"logit_bias": {20: 4.0}}, biased),
        ({"min_tokens": 6}, held_back),
        ({"presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {20: 4.0}}, (biased, penalised)),
    ],
)
def test_what_else_shapes_the_distribution_is_in_the_engines_log_probs(engine, reference, sampling, shape):
    """They are importance weights' denominators: what was drawn from, not what a model says."""
    for one in run(engine, *(request(f"r{i}", PROMPT, seed=i, **sampling) for i in range(4))).values():
        with torch.no_grad():
            logits_LV = reference.model(torch.tensor([[*PROMPT, *one.token_ids]])).logits[0, len(PROMPT) - 1 :]
        for place, token in enumerate(one.token_ids):
            for each in shape if isinstance(shape, tuple) else (shape,):
                each(logits_LV[place], one.token_ids[:place])
            assert one.rollout_logprobs[place] == pytest.approx(logits_LV[place].log_softmax(0)[token].item(), abs=1e-4)


@pytest.mark.parametrize(
    ("sampling", "pattern"),
    [
        ({"regex": "[0-9]{2}x"}, "[0-9]{2}x"),
        ({"choice": ("12", "7+")}, r"12|7\+"),
        ({"grammar": 'root ::= "a" | "b"'}, "a|b"),
        ({"json_schema": {"enum": [1, 2]}}, "[12]"),
        ({"json_schema": '{"enum": [1, 2]}'}, "[12]"),
    ],
)
def test_a_structure_is_kept_and_its_completions_end(engine, sampling, pattern):
    tokenizer = make_tokenizer()
    for one in run(engine, *(request(f"r{i}", PROMPT, seed=i, **sampling) for i in range(4))).values():
        text = tokenizer.decode(one.token_ids, skip_special_tokens=True)
        assert re.fullmatch(pattern, text), text
        assert one.finish_reason is FinishReason.STOP and max(one.rollout_logprobs) <= 0.0


def test_bad_words_never_come_and_ends_of_sequence_are_gone_past(engine):
    tokenizer = make_tokenizer()
    seven = tokenizer("7").input_ids[0]
    found = run(engine, *(request(f"r{i}", PROMPT, seed=i, max_tokens=200, bad_words=("7",)) for i in range(4)))
    assert all(seven not in one.token_ids for one in found.values())
    found = run(engine, *(request(f"r{i}", PROMPT, seed=i, max_tokens=200, ignore_eos=True) for i in range(4)))
    assert any(EOS in one.token_ids[:-1] for one in found.values())
    assert all(one.finish_reason is FinishReason.LENGTH for one in found.values())


@pytest.mark.parametrize("bad", [{"regex": "[0-9"}, {"json_schema": '{"enum": '}, {"logit_bias": {10**6: 1.0}}])
def test_a_sampling_that_vllm_refuses_ends_the_start_and_not_every_prompt(engine, bad):
    with pytest.raises(ConfigError, match="vLLM refuses the settings of `sampling`: "):
        engine._try_out(SamplingConfig.model_construct(max_tokens=4, **bad))
    assert engine.step() == []


def test_equal_requests_give_equal_tokens_bit_for_bit(engine):
    requests = [request(f"r{i}", PROMPT, seed=i) for i in range(4)]
    assert run(engine, *requests) == run(engine, *requests)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs vLLM draws by itself")
def test_each_token_is_where_its_requests_own_number_falls_in_the_distribution(engine, reference):
    found = run(engine, *(request(f"r{i}", PROMPT, seed=i) for i in range(8)))
    for seed in range(8):
        token_ids = found[f"r{seed}"].token_ids
        with torch.no_grad():
            logits_LV = reference.model(torch.tensor([[*PROMPT, *token_ids]])).logits[0, len(PROMPT) - 1 : -1]
        numbers = torch.rand(len(token_ids), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert token_at(numbers, logits_LV.softmax(-1)).tolist() == token_ids


def test_more_requests_than_slots_wait_their_turn(engine):
    for i in range(11):
        engine.add(request(f"r{i}", PROMPT, seed=i, max_tokens=4, ignore_eos=True))
    uses, ended = [], []
    while len(ended) < 11:
        ended += [output.request_id for output in engine.step() if output.finish_reason is not None]
        uses.append(engine.use())
    assert ended == [f"r{i}" for i in range(11)]
    assert uses[0].num_running == 4 == max(use.num_running for use in uses)
    assert {use.num_waiting for use in uses} == {0}, (
        "vLLM is not told of those that wait: it would not start them by their places"
    )


def test_it_says_how_many_requests_run_and_how_full_their_cache_is(engine):
    names = ["r0", "r1", "r2"]
    for seed, name in enumerate(names):
        engine.add(request(name, PROMPT, seed=seed, max_tokens=200, ignore_eos=True))
    engine.step()
    use = engine.use()
    assert (use.num_running, use.num_waiting) == (3, 0) and 0.0 < use.cache_share < 1.0
    engine.abort(names)
    assert engine.use() == EngineUse()


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


def test_tokens_are_kept_back_until_the_request_ends_and_are_told_when_asked_for(engine):
    whole = run(engine, request("whole", PROMPT, seed=3, max_tokens=48))["whole"]
    engine.add(request("again", PROMPT, seed=3, max_tokens=48))
    told = [output for _ in range(5) for output in engine.step()]
    assert [len(output.token_ids) for output in told] == [1]
    asked = engine.flush()
    assert [len(output.token_ids) for output in asked] == [4] and engine.flush() == []
    ending = [output for _ in range(43) for output in engine.step()]
    assert [len(output.token_ids) for output in ending] == [43]
    outputs = [*told, *asked, *ending]
    assert {output.request_id for output in outputs} == {"again"}
    assert [token for output in outputs for token in output.token_ids] == whole.token_ids
    assert [logprob for output in outputs for logprob in output.logprobs] == whole.rollout_logprobs


def test_what_is_sampled_beside_a_probe_is_told_when_asked_for_and_not_again(engine):
    whole = run(engine, request("whole", PROMPT, seed=3, max_tokens=12))["whole"]
    engine.add(request("again", PROMPT, seed=3, max_tokens=12))
    outputs = engine.step()
    engine.prompt_logprobs(PROBE)
    asked = engine.flush()
    assert sum(len(output.token_ids) for output in asked) >= 1 and engine.flush() == []
    outputs += [*asked, *(output for _ in range(12) for output in engine.step())]
    assert [token for output in outputs for token in output.token_ids] == whole.token_ids


def test_what_a_step_tells_after_the_end_of_its_probe_is_kept(engine, monkeypatch):
    """vLLM tells in the order in which it started: a request whose structure was compiled late comes after the probe."""
    step = engine._engine.step
    monkeypatch.setattr(engine._engine, "step", lambda: step()[::-1])
    engine.add(request("late", PROMPT, seed=3, max_tokens=2, ignore_eos=True))
    outputs = engine.step()
    engine.prompt_logprobs(PROBE)
    outputs += engine.flush()
    assert [(len(output.token_ids), output.finish_reason) for output in outputs] == [
        (1, None),
        (1, FinishReason.LENGTH),
    ]


def test_what_ended_beside_a_probe_and_is_aborted_then_is_not_told(engine):
    engine.add(request("gone", PROMPT, seed=3, max_tokens=2, ignore_eos=True))
    engine.step()
    engine.prompt_logprobs(PROBE)
    engine.abort(["gone"])
    assert engine.flush() == [] and engine.step() == []


def test_tokens_of_a_resumed_request_with_stop_texts_are_told_at_once_and_only_once(engine):
    kept = completion([5, 6], [-1.0, -1.0], reason=FinishReason.ABORTED)
    engine.add(request("rest", PROMPT, seed=3, stop=("no such text",), ignore_eos=True, kept=kept))
    assert [len(output.token_ids) for _ in range(3) for output in engine.step()] == [1, 1, 1]
    assert engine.flush() == []
    engine.abort(["rest"])


def test_of_those_that_wait_the_lower_place_starts_first_and_equal_ones_as_they_came(engine):
    for name, place in (("running1", 0), ("running2", 0), ("late", 9), ("old", 1), ("older", 0), ("old too", 1)):
        engine.add(dataclasses.replace(request(name, PROMPT, max_tokens=4), place=place))
    ended = [output.request_id for _ in range(16) for output in engine.step() if output.finish_reason is not None]
    assert ended == ["running1", "running2", "older", "old", "old too", "late"]


def test_a_request_that_vllm_does_not_take_is_an_output_with_the_reason_and_the_others_go_on(engine):
    bad_prompts = (request("unknown", [*PROMPT, 10**6]), request("long", PROMPT * 1000), request("empty", []))
    bad_sampling = (request("form", PROMPT, regex="[0-9"), request("types", PROMPT, choice="a|b"))
    for bad in (*bad_prompts, *bad_sampling):
        engine.add(bad)
    engine.add(request("good", PROMPT, max_tokens=4))
    outputs = [output for _ in range(4) for output in engine.step()]
    refusals = {output.request_id: output.refusal for output in outputs if output.refusal}
    assert refusals.keys() == {"unknown", "long", "empty", "form", "types"}
    assert refusals["unknown"].startswith("token id 1000000 is not in the model's vocabulary of ")
    assert "longer than the maximum model length" in refusals["long"]
    told = [output for output in outputs if not output.refusal]
    assert {output.request_id for output in told} == {"good"} and sum(len(output.token_ids) for output in told) == 4


def test_a_resumed_request_goes_on_after_its_kept_tokens(engine, reference):
    whole = run(engine, request("whole", PROMPT, seed=3, max_tokens=12))["whole"]
    kept = completion(whole.token_ids[:5], whole.rollout_logprobs[:5], reason=FinishReason.ABORTED)
    rest = run(engine, request("rest", PROMPT, seed=3, max_tokens=12, kept=kept))["rest"]
    assert len(rest.token_ids) == 7
    expected = reference.logprobs([*PROMPT, *kept.token_ids, *rest.token_ids])[len(PROMPT) + 4 :]
    assert largest_error(rest.rollout_logprobs, expected) < 1e-4


@pytest.mark.parametrize("max_tokens", [12, 7])
def test_a_stop_text_that_begins_in_kept_tokens_ends_a_resumed_request_also_with_the_last_token_of_its_limit(
    engine, max_tokens
):
    greedy = {"temperature": 0.0, "max_tokens": max_tokens}
    whole = run(engine, request("whole", PROMPT, **greedy))["whole"]
    kept = completion(whole.token_ids[:5], whole.rollout_logprobs[:5], reason=FinishReason.ABORTED)
    stop = make_tokenizer().decode(whole.token_ids[3:7])
    rest = run(engine, request("rest", PROMPT, stop=(stop,), kept=kept, **greedy))["rest"]
    assert (rest.token_ids, rest.finish_reason) == (whole.token_ids[5:7], FinishReason.STOP)
    assert engine.step() == []


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


def test_the_canary_is_the_first_to_get_room_in_a_full_cache(path, reference):
    """Behind all that wait it took 501 steps, in which 30 of 32 requests ended and were held."""
    engine = start_engine(path, max_concurrent_sequences=32, kv_cache_bytes=7 * 2**17)  # blocks of 128 tokens
    for i in range(32):
        engine.add(request(f"r{i}", PROMPT, seed=i, max_tokens=104, ignore_eos=True))
    for _ in range(60):
        engine.step()
    assert engine.use().num_waiting > 20
    assert largest_error(engine.prompt_logprobs(PROBE), reference.logprobs(PROBE)) < 1e-4
    assert engine.use().num_waiting > 16, "it does not wait for those that wait"


def test_an_idle_engine_steps_to_nothing(engine):
    assert engine.step() == []
