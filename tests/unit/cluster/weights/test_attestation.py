"""Whether an engine is believed: a measured noise floor with a cap, and the choice between the new version and the one before."""

import math

import pytest
import torch
from safetensors.torch import save_file

from cluster.contracts.config import ModelConfig, WeightsConfig
from cluster.contracts.errors import WeightsError
from cluster.weights.attestation import Attestor
from cluster.weights.manifest import Canary, WeightManifest
from tests.packed import pack

STARTING = (-1.0, -2.0)


def version(*logprobs: float, number: int = 7, files: str | None = None) -> WeightManifest:
    """A version under which the learner gives the probe these log-probs."""
    canary = Canary(token_ids=(1, 2, 3), logprobs=logprobs, starting_logprobs=STARTING, starting_files=files)
    manifest, _ = pack([("a", torch.ones(3))], policy_version=number, bucket_bytes=64, canary=canary)
    return manifest


def started(*measured: float, dtype: str = "bfloat16", **settings) -> Attestor:
    """An engine that gives the probe these log-probs under its starting files."""
    attestor = Attestor(worker="w0", dtype=dtype, **settings)
    attestor.start(version(*STARTING).canary, measured)
    return attestor


def test_the_noise_floor_is_the_mean_difference_under_the_starting_files():
    attestor = started(-1.01, -2.03)
    proof = attestor.compare(version(-1.5, -2.5), [-1.51, -2.47])
    assert proof.noise_floor == pytest.approx(0.02)
    assert (proof.canary_mean_error, proof.canary_max_error) == (pytest.approx(0.02), pytest.approx(0.03))
    assert proof.distinguishable


@pytest.mark.parametrize(("error", "is_believed"), [(0.055, True), (0.065, False)])
def test_a_version_may_be_off_by_three_times_the_noise(error, is_believed):
    attestor, measured = started(-1.02, -2.02), [-1.0 - error, -1.8 - error]
    if is_believed:
        assert attestor.compare(version(-1.0, -1.8), measured).canary_mean_error == pytest.approx(error)
    else:
        with pytest.raises(
            WeightsError, match=r"w0 does not compute policy version 7 .* off by 0\.065 nats .* 0\.06 is allowed"
        ):
            attestor.compare(version(-1.0, -1.8), measured)


def test_an_unlikelier_probe_is_allowed_proportionally_more_noise():
    # Mean nats rise from 1.5 to 4.5, so the noise of 0.02 may be 0.06, and an error of 0.15 is below three times that.
    attestor = started(-1.02, -2.02)
    assert attestor.compare(version(-4.0, -5.0), [-4.15, -5.15]).canary_mean_error == pytest.approx(0.15)
    # Versions are told apart from twice that on, 0.12.
    assert not attestor.compare(version(-4.1, -5.1), [-4.1, -5.1]).distinguishable


@pytest.mark.parametrize(
    ("dtype", "is_quantized", "allowed"),
    [("bfloat16", False, 6e-3), ("float32", False, 1.5e-4), ("float32", True, 6e-3)],
)
def test_an_engine_without_noise_at_its_start_is_measured_once_and_allowed_a_little(dtype, is_quantized, allowed):
    attestor = started(*STARTING, dtype=dtype, is_quantized=is_quantized)
    assert not attestor.needs_start
    below, above = ([-1.0 - share * allowed, -2.0 - share * allowed] for share in (0.99, 1.01))
    assert attestor.compare(version(*STARTING), below).tolerance == pytest.approx(allowed)
    with pytest.raises(WeightsError, match="does not compute policy version 7"):
        attestor.compare(version(*STARTING), above)


def test_an_engine_that_joins_at_a_later_version_is_measured_under_its_starting_files():
    attestor = Attestor(worker="w0", dtype="bfloat16")
    attestor.start(version(-3.0, -3.0).canary, [-1.02, -2.02])
    proof = attestor.compare(version(-3.0, -3.0), [-3.0, -3.0])
    assert proof.noise_floor == pytest.approx(0.02) and proof.distinguishable


@pytest.mark.parametrize(("dtype", "floor"), [("bfloat16", 0.21), ("float32", 1.1e-3), ("float32", math.nan)])
def test_a_broken_engine_cannot_declare_its_brokenness_as_noise(dtype, floor):
    with pytest.raises(WeightsError, match="w0 does not compute what the learner computes with the same files"):
        started(-1.0 - floor, -2.0 - floor, dtype=dtype)


def test_other_files_than_the_learners_are_refused_before_they_are_measured():
    attestor = Attestor(worker="w0", dtype="bfloat16", files=lambda: "aaaa")
    with pytest.raises(
        WeightsError, match=r"loaded other files than the learner .* model\.path must hold the same model"
    ):
        attestor.start(version(*STARTING, files="bbbb").canary, STARTING)
    attestor.start(version(*STARTING, files="aaaa").canary, STARTING)


def test_the_files_that_are_compared_are_those_of_the_model(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    attestor = Attestor.from_config(WeightsConfig(), ModelConfig(path=str(tmp_path)), worker="w0")
    with pytest.raises(WeightsError, match="loaded other files than the learner"):
        attestor.start(version(*STARTING, files="bbbb").canary, STARTING)


@pytest.mark.parametrize(("engines", "learners"), [(None, "bbbb"), ("aaaa", None)])
def test_files_without_a_fingerprint_are_judged_by_the_log_probs_alone(engines, learners):
    attestor = Attestor(worker="w0", dtype="bfloat16", files=lambda: engines)
    attestor.start(version(*STARTING, files=learners).canary, STARTING)
    assert not attestor.needs_start


def test_stale_weights_inside_the_tolerance_are_caught_when_the_versions_can_be_told_apart():
    # Noise 0.02: allowed are 0.06, told apart is from 0.04 on. The step moves the probe by 0.05, and the engine did not take it.
    attestor = started(-1.02, -2.02)
    with pytest.raises(WeightsError, match=r"by 0\.01 from the version before, to which it is nearer"):
        attestor.compare(version(-1.05, -2.05), [-1.01, -2.01])


def test_a_step_that_noise_could_hide_is_said_to_be_indistinguishable():
    attestor = started(-1.02, -2.02)
    assert not attestor.compare(version(-1.03, -2.03), [-1.01, -2.01]).distinguishable


def test_each_version_is_told_from_the_one_that_the_engine_served_before():
    attestor = started(-1.0, -2.0)
    attestor.compare(version(-3.0, -3.0, number=1), [-3.0, -3.0])
    assert not attestor.compare(version(-3.0, -3.0, number=2), [-3.0, -3.0]).distinguishable
    assert attestor.compare(version(*STARTING, number=3), STARTING).distinguishable


def test_a_version_is_told_from_the_learners_log_probs_of_the_one_before_and_not_from_the_engines():
    # The learner's differ by 0.03, which noise of 0.02 could hide. The engine's of the version before, 0.05 off, differ by 0.08.
    attestor = started(-1.02, -2.02)
    attestor.compare(version(-1.1, -2.1, number=1), [-1.15, -2.15])
    assert not attestor.compare(version(-1.07, -2.07, number=2), [-1.07, -2.07]).distinguishable


def test_a_refused_version_is_not_taken_for_the_one_before():
    attestor = started(-1.0, -2.0)
    with pytest.raises(WeightsError):
        attestor.compare(version(-3.0, -3.0), [-1.0, -2.0])
    assert attestor.compare(version(-3.0, -3.0), [-3.0, -3.0]).distinguishable


def test_log_probs_that_are_no_numbers_are_refused():
    with pytest.raises(WeightsError, match="off by nan nats"):
        started(-1.0, -2.0).compare(version(-1.0, -2.0), [-1.0, math.nan])


def test_an_absolute_tolerance_replaces_the_measured_one():
    weights, model = WeightsConfig(canary_tolerance=0.5), ModelConfig(path="m", dtype="float32")
    attestor = Attestor.from_config(weights, model, worker="w0")
    attestor.start(version(*STARTING).canary, [-1.4, -2.4])
    assert attestor.compare(version(-1.0, -2.0), [-1.45, -2.45]).noise_floor == pytest.approx(0.4)
    with pytest.raises(WeightsError, match=r"0\.5 is allowed"):
        attestor.compare(version(-1.0, -2.0), [-1.55, -2.55])


def test_an_engine_of_8_bits_may_be_noisier_from_the_start_and_its_versions_as_much_so():
    attestor = started(-1.4, -2.4, is_quantized=True)
    assert attestor.compare(version(-1.0, -2.0), [-2.1, -3.1]).tolerance == pytest.approx(1.2)
    with pytest.raises(
        WeightsError, match=r"0\.5 is the most that passes for noise in 8 bits\. .*int8_per_channel rounds less"
    ):
        started(-1.6, -2.6, is_quantized=True)


@pytest.mark.parametrize(("is_quantized", "most"), [(False, r"0\.2 is the most"), (True, r"0\.5 is the most")])
def test_whether_an_engine_is_quantized_is_said_beside_its_model(is_quantized, most):
    attestor = Attestor.from_config(WeightsConfig(), ModelConfig(path="m"), worker="w0", is_quantized=is_quantized)
    with pytest.raises(WeightsError, match=most):
        attestor.start(version(*STARTING).canary, [-3.0, -4.0])
