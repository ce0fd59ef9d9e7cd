import gc
import math
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.drawing import Uniforms, token_at

LARGEST = 1 - 2**-53
"""The largest number that torch.rand gives in float64."""


def tokens_at(shares: list[float], probs: list[float]) -> list[int]:
    rows = torch.tensor([probs] * len(shares), dtype=torch.float32)
    return token_at(torch.tensor(shares, dtype=torch.float64), rows).tolist()


def test_a_share_falls_to_the_token_whose_probability_it_lies_in():
    """The sums are 0, 0.25, 0.75, 0.75, 1."""
    assert tokens_at([0.0, 0.2, 0.25, 0.5, 0.75, 0.9], [0.0, 0.25, 0.5, 0.0, 0.25]) == [1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("share", [0.0, 0.5, LARGEST])
@pytest.mark.parametrize("vocabulary", [1, 511, 512, 513, 1024, 1600])
def test_a_token_without_probability_is_never_drawn(vocabulary, share):
    for only in {0, vocabulary // 2, vocabulary - 1}:
        probs = [0.0] * vocabulary
        probs[only] = 1e-30
        assert tokens_at([share], probs) == [only]


@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=1200).filter(any),
    st.integers(min_value=0, max_value=2**20 - 1),
)
def test_the_token_is_that_of_sums_one_after_the_other(weights, numerator):
    """Sums of multiples of 1/2 have no rounding; probabilities need not add up to 1."""
    share = numerator / 2**20
    target = share * sum(weights)
    expected = next(token for token, total in enumerate(accumulate(weights)) if total > target)
    (found,) = tokens_at([share], weights)
    # The share inside a block is a quotient, which is rounded: where a sum equals the target, the token before it is right too.
    assert found == expected or (weights[found] > 0 and abs(sum(weights[: found + 1]) - target) < 1e-9)


def test_rows_do_not_share_their_shares_or_probabilities():
    probs = torch.zeros(3, 1100)
    probs[0, [3, 700]] = 0.5
    probs[1, [2, 1099]] = 0.5
    probs[2, 5] = 1.0
    assert token_at(torch.tensor([0.6, 0.4, 0.9], dtype=torch.float64), probs).tolist() == [700, 2, 5]


def test_probabilities_that_are_no_numbers_give_a_token_of_the_vocabulary():
    assert 0 <= token_at(torch.tensor([0.5], dtype=torch.float64), torch.full((1, 700), math.nan)).item() < 700


def test_tokens_come_as_often_as_their_probabilities_say():
    """100,000 draws of 600 tokens: the sum of squared deviations, each by its expectation, is chi-squared with 599 degrees of freedom, of
    mean 599 and deviation 34.6."""
    num_draws, generator = 100_000, torch.Generator().manual_seed(1)
    probs = torch.randn(600, generator=generator).softmax(0)
    drawn = token_at(torch.rand(num_draws, generator=generator, dtype=torch.float64), probs.expand(num_draws, -1))
    expected = probs * num_draws
    chi_squared = ((drawn.bincount(minlength=600) - expected) ** 2 / expected).sum().item()
    assert abs(chi_squared - 599) < 4 * 34.6


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_requests_numbers_are_its_generators_own_whatever_runs_beside_it():
    alone, among = Uniforms(), Uniforms()
    own, other = seeded(3), seeded(4)
    expected = torch.rand(150, generator=seeded(3), dtype=torch.float64).tolist()
    assert [alone.of({0: own}, num_rows=1).item() for _ in range(150)] == expected
    own, found = seeded(3), []
    for step in range(150):
        rows = {0: other, 1: own} if step % 3 else {0: own}
        numbers = among.of(rows, num_rows=len(rows))
        found.append(numbers[1 if step % 3 else 0].item())
    assert found == expected


def test_a_row_without_a_generator_draws_from_torchs_own():
    torch.manual_seed(7)
    expected = torch.rand(2, dtype=torch.float64)
    torch.manual_seed(7)
    numbers = Uniforms().of({0: seeded(3)}, num_rows=2)
    assert numbers.dtype == torch.float64
    assert numbers.tolist() == [torch.rand(1, generator=seeded(3), dtype=torch.float64).item(), expected[1].item()]


def test_the_numbers_of_a_request_go_with_its_generator():
    uniforms, generator = Uniforms(), seeded(3)
    uniforms.of({0: generator}, num_rows=1)
    assert len(uniforms._ahead) == 1
    del generator
    gc.collect()
    assert len(uniforms._ahead) == 0
