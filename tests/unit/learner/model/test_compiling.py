from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.testing import assert_close

from cluster.contracts.errors import ConfigError
from learner.learner import Learner
from learner.model import attention
from tests.models import make_tiny_model
from tests.unit.learner.model import flash
from tests.unit.learner.trajectories import make_config, make_group

CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    # Its windows of 24 tokens are shorter than the longest sequences here.
    "gemma3": {},
    "adapters": {"lora": {"rank": 2}},
    "checkpointed": {"activation_checkpointing": True},
    "flash, checkpointed": {"activation_checkpointing": True},
    "flash, adapters": {"lora": {"rank": 2}},
}
WITH_KERNELS = "checkpointed"
"""The compiler of C++ takes a minute a case, and these layers are computed forward, again, and backward. What is traced, and how often,
does not depend on it."""
MOST_GRAPHS = 16
"""Four of a layer, around attention; of two kinds of layers, with a gradient of their input or without one."""
MOST_WHOLE_GRAPHS = 8
"""A layer whole, in two passes: with a gradient of its input or without one, with shared prompts or without."""


@pytest.fixture(autouse=True)
def _compiles_anew():
    torch.compiler.reset()
    counters.clear()
    # The cache on the disk gives out graphs that were made for another processor's vectors, which compute NaN.
    with inductor.patch(force_disable_caches=True):
        yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_learner_learns_the_same_and_is_not_compiled_for_every_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
):
    if case != WITH_KERNELS:
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    takes_flash = case.startswith("flash")
    if takes_flash:
        flash.serve_traced(monkeypatch)
        monkeypatch.setattr(attention, "attend_in_buckets", None)
    path = make_tiny_model(tmp_path, architecture="gemma3" if case == "gemma3" else "llama")
    eager, compiled = (
        Learner(make_config(path, learner={"compile": is_compiled, **CASES[case]})) for is_compiled in (False, True)
    )
    graphs: list[int] = []
    for seed, longest in enumerate((4, 9, 20, 3, 15, 2)):
        groups = [make_group(i, seed=seed, prompt_length=longest, max_length=longest) for i in range(1 + seed % 3)]
        found, expected = (learner.update(*groups).metrics for learner in (compiled, eager))
        for name in ("mismatch/mean_abs_nats", "learner/gradient_norm", "learner/loss"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6)
        graphs.append(counters["stats"]["unique_graphs"])
    weights = dict(eager.networks.named_parameters())
    for name, tensor in compiled.networks.named_parameters():
        assert_close(tensor, weights[name], rtol=1e-3, atol=1e-4)
    most = MOST_WHOLE_GRAPHS if takes_flash else MOST_GRAPHS
    assert 0 < graphs[0] <= graphs[-1] <= most and graphs[2:] == graphs[-1:] * 4


@pytest.mark.slow
def test_a_compilation_that_fails_is_one_error(model_path: Path):
    says = r"learner\.compile=true: torch does not compile this model: .*; leave it out"
    # After pytest's `monkeypatch` torch would have no such setting any more.
    with inductor.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(ConfigError, match=says):
        Learner(make_config(model_path, learner={"compile": True}))  # its probe is the first pass
