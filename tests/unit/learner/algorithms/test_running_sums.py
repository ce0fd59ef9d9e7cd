import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from learner.algorithms.running_sums import doubled, running_sum


def test_what_stands_before_counts_with_what_is_there():
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 0.0, -1.0, 0.0, 2.0]])
    for found in (running_sum(x), doubled(x)):
        assert found.tolist() == [[1, 3, 6, 10, 15], [1, 1, 0, 0, 2]]


@given(st.integers(0, 3), st.integers(0, 40))
def test_doublings_give_torchs_own_sums_of_any_shape(num_rows: int, width: int):
    x = torch.arange(1.0, 1 + num_rows * width, dtype=torch.float64).view(num_rows, width)
    assert_close(doubled(x), x.cumsum(1), rtol=0, atol=0)
