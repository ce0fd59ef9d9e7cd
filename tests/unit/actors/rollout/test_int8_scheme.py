"""Weights become integers of 8 bits and a scale for each output channel."""

import warnings

import pytest
import torch
from torch.testing import assert_close

from cluster.contracts.importing import importing_for_good


@pytest.fixture(scope="module")
def quantize():
    # It imports vLLM, four seconds in each process of tests: here in the one that runs these.
    with warnings.catch_warnings(action="ignore"), importing_for_good():
        from actors.rollout.int8_scheme import quantize

    return quantize


def test_a_channels_largest_weight_becomes_127_whatever_its_sign(quantize):
    integers, scales = quantize(torch.tensor([[1.27, -0.1], [0.5, -2.54]]))
    assert_close(scales, torch.tensor([[0.01], [0.02]]))
    assert_close(integers, torch.tensor([[127, -10], [25, -127]], dtype=torch.int8))


def test_a_weight_is_off_by_half_a_scale_at_most(quantize):
    weights = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    integers, scales = quantize(weights)
    errors = (integers.float() * scales - weights.float()).abs()
    assert bool((errors <= 0.5001 * scales).all()) and float(errors.max()) > 0.4 * float(scales.min())


def test_a_channel_of_zeros_stays_one(quantize):
    integers, scales = quantize(torch.zeros(1, 4))
    assert integers.tolist() == [[0, 0, 0, 0]] and scales.tolist() == [[1.0]]
