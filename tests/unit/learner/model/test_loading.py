"""Weights read into shards are those that loading the whole model gives, buffers, tied and added parameters included.

One rank alone is a group too: what is sharded over one is whole, and everything can be compared in one process.
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh

from cluster.contracts.config import RunConfig
from learner.distributed import Ranks, leave, whole
from learner.learner import Learner
from learner.model.building import build
from learner.model.critic import Networks
from tests.models import make_tiny_model
from tests.unit.learner.trajectories import make_config, make_group


def _meet(folder: Path) -> Ranks:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting-place'}", rank=0, world_size=1)
    return Ranks(rank=0, size=1, device=torch.device("cpu"), mesh=DeviceMesh("cpu", [0]))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Ranks]:
    yield _meet(tmp_path)
    leave()


def _built(config: RunConfig, ranks: Ranks) -> tuple[Networks, str]:
    return build(
        config.model,
        learner=config.learner,
        value=config.algorithm.value,
        temperature=config.sampling.temperature,
        seed=config.seed,
        ranks=ranks,
        compute_dtype=torch.float32,
    )


def _unsharded(config: RunConfig) -> Networks:
    return _built(config, Ranks(rank=0, size=1, device=torch.device("cpu"), mesh=None))[0]


def assert_equal(sharded: Networks, expected: Networks) -> None:
    """Bit for bit, and tied where the other is tied."""
    own = dict(sharded.named_parameters())
    assert own.keys() == dict(expected.named_parameters()).keys()
    for name, parameter in expected.named_parameters():
        assert torch.equal(whole(own[name].detach()), parameter), name
        assert own[name].requires_grad == parameter.requires_grad, name
    buffers = dict(sharded.named_buffers())
    assert buffers.keys() == dict(expected.named_buffers()).keys()
    for name, buffer in expected.named_buffers():
        assert torch.equal(buffers[name], buffer), name
    assert sharded.policy.layout == expected.policy.layout


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma3"])
@pytest.mark.parametrize("tied", [True, False])
def test_streamed_weights_are_the_loaded_ones(alone: Ranks, tmp_path: Path, architecture: Any, tied: bool):
    config = make_config(make_tiny_model(tmp_path, architecture=architecture, tied=tied, dtype="bfloat16"))
    networks, loading = _built(config, alone)
    assert loading == "streamed"
    assert_equal(networks, _unsharded(config))


@pytest.mark.parametrize(
    "sections",
    [
        {"learner": {"lora": {"rank": 4}}},
        {"algorithm": {"advantage": "gae", "value": {"backbone": "own"}}},
        {"algorithm": {"advantage": "gae", "value": {"backbone": "shared"}}},
    ],
    ids=["lora", "own-critic", "shared-critic"],
)
def test_what_is_added_to_the_model_starts_the_same(alone: Ranks, tmp_path: Path, sections: dict[str, Any]):
    config = make_config(make_tiny_model(tmp_path), **sections)
    networks, loading = _built(config, alone)
    assert loading == "streamed"
    assert_equal(networks, _unsharded(config))
    if networks.critic is not None and networks.critic.backbone is not None:
        attention = networks.policy.causal_lm.config._attn_implementation
        assert networks.critic.backbone.config._attn_implementation == attention


def test_weights_in_several_files_are_found(alone: Ranks, tmp_path: Path):
    config = make_config(make_tiny_model(tmp_path))
    expected = _unsharded(config)
    expected.policy.causal_lm.save_pretrained(tmp_path, max_shard_size="100KB")
    (tmp_path / "model.safetensors").unlink()
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    networks, loading = _built(config, alone)
    assert loading == "streamed"
    assert_equal(networks, expected)


def test_a_model_stored_under_other_names_is_loaded_whole_and_sent(alone: Ranks, tmp_path: Path):
    config = make_config(make_tiny_model(tmp_path))
    expected = _unsharded(config)
    # As a checkpoint of the backbone alone is: transformers finds the names, rows cannot be read by them.
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    networks, loading = _built(config, alone)
    assert loading == "sent by rank 0"
    assert_equal(networks, expected)


def test_a_model_without_safetensors_is_loaded_whole_and_sent(alone: Ranks, tmp_path: Path):
    config = make_config(make_tiny_model(tmp_path))
    expected = _unsharded(config)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    networks, loading = _built(config, alone)
    assert loading == "sent by rank 0"
    assert_equal(networks, expected)


def test_a_closed_learner_leaves_no_thread_of_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Ranks, "join", lambda **_: _meet(tmp_path))
    gc.collect()  # what earlier tests met in
    num_before = _num_group_threads()
    learner = Learner(make_config(make_tiny_model(tmp_path / "model")))
    learner.update(make_group(0))
    list(learner.publish())
    assert _num_group_threads() > num_before
    learner.close()
    assert _num_group_threads() <= num_before


def _num_group_threads() -> int:
    """Native threads of process groups in this process."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo" in name or "tcpstore" in name for name in names)
