"""The learner on a GPU computes in float32 what it computes on a CPU, whole and sharded (FSDP2), and repeats itself bit for bit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.first_look import FirstLook
from learner.forward_backward import Passes
from learner.learner import Learner
from tests.integration.learned import OPTIONS, assert_learned_alike, learned, options_of
from tests.integration.ranks import Ranks
from tests.models import make_tiny_model
from tests.unit.learner.trajectories import make_config, make_group

DETERMINISTIC: dict[str, Any] = {
    "deterministic": True,
    # A running sum over the vocabulary, which torch's own deterministic mode refuses on GPUs.
    "sampling": {"top_p": 0.9},
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as pair:
        yield pair


def gpus(device: torch.device) -> dict[str, int]:
    return {"gpus_per_rank": 1 if device.type == "cuda" else 0}


def assert_gpus_compute_what_a_cpu_computes(ranks: Ranks, folder: Path, name: str, *, num_gpus: int) -> None:
    """A rank each."""
    model, options = make_tiny_model(folder / "model"), options_of(name, folder)
    on_cpu = learned(ranks, folder / "cpu", model, num_ranks=1, **options)
    on_gpus = learned(ranks, folder / "gpus", model, num_ranks=num_gpus, gpus_per_rank=1, **options)
    assert_learned_alike(on_gpus, on_cpu, is_half=options.get("dtype") == "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_a_gpu_computes_what_a_cpu_computes(ranks: Ranks, tmp_path: Path, name: str):
    assert_gpus_compute_what_a_cpu_computes(ranks, tmp_path, name, num_gpus=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_single_rank_that_is_sharded_computes_what_a_whole_one_computes(
    ranks: Ranks, tmp_path: Path, device: torch.device, dtype: str
):
    model = make_tiny_model(tmp_path / "model")
    whole = learned(ranks, tmp_path / "whole", model, num_ranks=1, dtype=dtype)
    sharded = learned(ranks, tmp_path / "sharded", model, num_ranks=1, shards_alone=True, dtype=dtype, **gpus(device))
    assert_learned_alike(sharded, whole, is_half=dtype == "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_host_waits_for_no_pass(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch):
    """It tells the GPU of all passes of an update, so that the GPU never waits for it."""
    config = make_config(
        make_tiny_model(tmp_path / "model"),
        dtype=dtype,
        algorithm={"proximal": "recompute"},
        learner={"gpus_per_rank": 0.2, "max_tokens_per_micro_batch": 40},
    )
    learner = Learner(config)

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return method(*args, **more)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return run

    monkeypatch.setattr(Passes, "accumulate", watched(Passes.accumulate))
    monkeypatch.setattr(FirstLook, "_seen", watched(FirstLook._seen))
    found = learner.update(*[make_group(i) for i in range(4)]).metrics
    assert found["learner/micro_batches"] >= 2 and found["learner/updates"] == 1
    learner.close()


@pytest.mark.gpu
def test_compiled_layers_that_take_flash_attention_in_compute_what_others_compute(ranks: Ranks, tmp_path: Path):
    model = make_tiny_model(tmp_path / "model")
    options: dict[str, Any] = {"num_ranks": 1, "gpus_per_rank": 1, "dtype": "bfloat16"}
    plain = learned(ranks, tmp_path / "plain", model, **options)
    compiled = learned(ranks, tmp_path / "compiled", model, compile=True, **options)
    assert_learned_alike(compiled, plain, is_half=True)


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("name", OPTIONS)
def test_two_ranks_on_two_gpus_compute_what_a_cpu_computes(ranks: Ranks, tmp_path: Path, name: str):
    assert_gpus_compute_what_a_cpu_computes(ranks, tmp_path, name, num_gpus=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_deterministic_learner_that_goes_on_from_a_checkpoint_learns_the_same_bits(
    ranks: Ranks, tmp_path: Path, device: torch.device, dtype: str
):
    model, checkpoints = make_tiny_model(tmp_path / "model"), tmp_path / "checkpoints"
    options = {"num_ranks": 1, "dtype": dtype, **gpus(device), **DETERMINISTIC}
    whole = learned(ranks, tmp_path / "whole", model, **options)
    first = learned(ranks, tmp_path / "first", model, until=3, save=str(checkpoints / "step-000003"), **options)
    resumed = learned(ranks, tmp_path / "resumed", model, restore=str(checkpoints), **options)
    assert first["errors"] == [None]
    assert not all(torch.equal(tensor, first["weights"][name]) for name, tensor in whole["weights"].items())
    assert all(torch.equal(tensor, resumed["weights"][name]) for name, tensor in whole["weights"].items())
    assert resumed["canary"] == whole["canary"]


@pytest.mark.parametrize(
    "shards",
    [
        pytest.param(True, id="cpu, sharded"),
        pytest.param(True, id="cuda, sharded", marks=pytest.mark.gpu),
        pytest.param(False, id="cuda, whole", marks=pytest.mark.gpu),
    ],
)
def test_a_rank_that_rests_after_each_step_learns_the_same_bits(
    ranks: Ranks, tmp_path: Path, request: pytest.FixtureRequest, shards: bool
):
    is_on_gpu = request.node.get_closest_marker("gpu") is not None
    model = make_tiny_model(tmp_path / "model")
    options = {"num_ranks": 1, "shards_alone": shards, "gpus_per_rank": int(is_on_gpu), **DETERMINISTIC}
    awake = learned(ranks, tmp_path / "awake", model, **options)
    rested = learned(ranks, tmp_path / "rested", model, rests=True, **options)
    assert rested["at_rest"] == [[0] * 5], "no byte of weights and optimizer is left on the device"
    assert all(torch.equal(tensor, rested["weights"][name]) for name, tensor in awake["weights"].items())
    assert rested["canary"] == awake["canary"]
