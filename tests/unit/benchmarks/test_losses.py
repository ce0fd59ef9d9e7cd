import pytest
from torch.testing import assert_close

from tests.benchmarks import losses

NAMES = ["ppo_clip", "gspo_token", "cispo", "sapo", "gmpo", "k3", "value_clip"]


@pytest.mark.parametrize("name", NAMES)
def test_the_plain_formula_is_the_loss_that_it_is_held_against(name, monkeypatch):
    monkeypatch.setattr(losses, "ROWS", 4)
    monkeypatch.setattr(losses, "WIDTH", 32)
    inputs = losses._inputs("cpu")
    ours = losses._ours(inputs)
    assert_close(ours[name](), losses._plain(name, inputs)(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_made_of_the_mask_in_each_call_as_the_peer_does(name):
    inputs = losses._inputs("cpu")
    ours = losses._ours(inputs)
    whole = ours[name]().item()
    inputs["mask"][:, 100:] = False
    fresh = losses._ours(inputs)[name]().item()
    assert fresh != pytest.approx(whole) and ours[name]().item() == pytest.approx(fresh)
