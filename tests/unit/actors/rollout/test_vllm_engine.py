import pytest

from actors.rollout.vllm_engine import _has_float32_head
from cluster.contracts.config import RolloutConfig


@pytest.mark.parametrize(
    ("head_dtype", "on_cpu", "on_gpu"), [("auto", False, True), ("model", False, False), ("float32", True, True)]
)
def test_the_head_is_in_float32_on_gpus_alone_unless_the_setting_says_so(head_dtype, on_cpu, on_gpu):
    rollout = RolloutConfig(head_dtype=head_dtype)
    assert _has_float32_head(rollout, is_cpu=True) is on_cpu
    assert _has_float32_head(rollout, is_cpu=False) is on_gpu
