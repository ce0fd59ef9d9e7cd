import pytest
from torch.testing import assert_close

from tests.benchmarks import losses


@pytest.mark.parametrize("name", ["ppo_clip", "gspo_token", "cispo", "sapo", "gmpo", "k3", "value_clip"])
def test_the_plain_formula_is_the_loss_that_it_is_held_against(name, monkeypatch):
    monkeypatch.setattr(losses, "ROWS", 4)
    monkeypatch.setattr(losses, "WIDTH", 32)
    inputs = losses._inputs("cpu")
    ours = losses._ours(inputs)
    assert_close(ours[name](), losses._plain(name, inputs)(), rtol=1e-3, atol=1e-4)
