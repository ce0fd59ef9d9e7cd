"""What stands for the policy at the start of the step."""

from torch import tensor
from torch.testing import assert_close

from learner.algorithms.objective import proximal
from tests.unit.learner.algorithms.batches import row


def test_the_approximate_proximal_policy_goes_with_the_lag():
    got = proximal.approximate_proximal(
        row(-3.0, -3.0, -3.0), policy_logprobs_BT=row(-1.0, -1.0, -1.0), lags_BT=tensor([[0, 1, 4]])
    )
    assert_close(got, row(-3.0, -3.0, -1.5))
