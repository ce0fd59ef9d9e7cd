"""Weights read into shards are those that loading the whole model gives, buffers, tied and added parameters included.

One rank alone is a group too: what is sharded over one is whole, and everything can be compared in one process.
"""

import contextlib
import gc
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.testing import assert_close
from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    ApertusConfig,
    ApertusForCausalLM,
    AutoModelForSequenceClassification,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from learner.distributed import Ranks, leave, whole
from learner.learner import Learner
from learner.model.building import build
from learner.model.critic import Networks
from learner.model.loading import skeleton
from learner.model.packing import lay_out
from learner.model.policy import load, token_row
from learner.optimizer import Optimizer
from learner.publishing import exported
from tests.models import make_tiny_model, make_tiny_reward_model
from tests.unit.learner.model.test_policy import SIZES, reads_the_mask
from tests.unit.learner.trajectories import make_config, make_group

pytestmark = pytest.mark.slow


def _meet(folder: Path) -> Ranks:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting-place'}", rank=0, world_size=1)
    return Ranks(rank=0, size=1, device=torch.device("cpu"), mesh=DeviceMesh("cpu", [0]))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Ranks]:
    yield _meet(tmp_path)
    leave()


def _built(config: RunConfig, ranks: Ranks) -> tuple[Networks, str]:
    return build(config, ranks=ranks)


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


def test_buffers_without_a_dimension_are_streamed(alone: Ranks, tmp_path: Path):
    """Apertus stores two numbers of each activation."""
    ApertusForCausalLM(ApertusConfig(**SIZES)).save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.act_fn.beta"].shape == ()
    config = make_config(tmp_path)
    networks, loading = _built(config, alone)
    assert loading == "streamed"
    assert_equal(networks, _unsharded(config))


@pytest.mark.parametrize("has_defaults", [True, False])
def test_a_skeleton_attends_as_configured_generates_by_its_folders_defaults_and_drops_nothing(
    tmp_path: Path, has_defaults: bool
):
    path = make_tiny_model(tmp_path)
    config = json.loads((path / "config.json").read_text()) | {"attention_dropout": 0.5}
    (path / "config.json").write_text(json.dumps(config))
    defaults = path / "generation_config.json"
    defaults.unlink(missing_ok=True)
    if has_defaults:
        defaults.write_text('{"eos_token_id": [5, 6]}')
    model = make_config(path).model.model_copy(update={"attention": "eager"})
    built, loaded = skeleton(model), load(model, dtype=torch.float32)
    assert built.generation_config is not None and loaded.generation_config is not None
    found, expected = (each.generation_config.eos_token_id for each in (built, loaded))
    assert found == expected and (found == [5, 6]) is has_defaults
    assert built.get_submodule("model.layers.0.self_attn").attention_dropout == 0.0
    assert built.config._attn_implementation == "eager"


def test_ranks_stream_only_if_all_of_them_can(alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A rank whose machine lacks a file would wait for tensors that rank 0 does not send."""
    monkeypatch.setattr(Ranks, "sum", lambda ranks, tensor: tensor - 1)
    config = make_config(make_tiny_model(tmp_path))
    networks, loading = _built(config, alone)
    assert loading == "sent by rank 0"
    assert_equal(networks, _unsharded(config))


def test_a_buffer_that_the_model_computes_is_not_read_from_files(alone: Ranks, tmp_path: Path):
    """Older versions stored frequencies of rotary embeddings, in the type of the weights."""
    config = make_config(make_tiny_model(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.rotary_emb.inv_freq"] = torch.zeros(16)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    networks, loading = _built(config, alone)
    assert loading == "streamed"
    assert_equal(networks, _unsharded(config))


def test_a_buffer_that_the_files_lack_is_refused_by_ranks_too(alone: Ranks, tmp_path: Path):
    ApertusForCausalLM(ApertusConfig(**SIZES)).save_pretrained(tmp_path)
    name = "model.layers.0.mlp.act_fn.beta"
    stored = load_file(tmp_path / "model.safetensors")
    del stored[name]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"lacks weights of a ApertusForCausalLM: {name}"):
        _built(make_config(tmp_path), alone)


def test_what_a_model_freezes_keeps_its_bits_on_one_rank_and_on_several(alone: Ranks, tmp_path: Path):
    """Ernie's routers add a bias to their scores, a parameter that does not train and that engines keep in float32."""
    mixture = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1}
    model = Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**SIZES, **mixture))
    bias = torch.arange(1, 5)[None] / 3
    model.get_parameter("model.layers.1.mlp.gate.moe_statics.e_score_correction_bias").data.copy_(bias)
    model.save_pretrained(tmp_path)
    config = make_config(tmp_path, dtype="bfloat16")
    for networks in (_unsharded(config), _built(config, alone)[0]):
        Optimizer.of_run(networks.named_parameters(), config)
        stored = dict(exported(networks.policy.causal_lm, dtype=torch.bfloat16))
        assert stored.keys() == load_file(tmp_path / "model.safetensors").keys()
        assert torch.equal(stored["model.layers.1.mlp.moe_statics.e_score_correction_bias"], bias)
        assert stored["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16


def test_what_a_model_freezes_keeps_its_bits_where_the_others_are_rounded(tmp_path: Path):
    """As for a reference. AFMoE's code does not ask for float32."""
    model = AfmoeForCausalLM(AfmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16))
    name = "model.layers.1.mlp.expert_bias"
    bias = torch.arange(4) / 3
    model.get_parameter(name).data.copy_(bias)
    model.save_pretrained(tmp_path)
    loaded = load(make_config(tmp_path).model, dtype=torch.bfloat16)
    assert torch.equal(loaded.get_buffer(name), bias)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}


def test_what_balances_experts_is_not_rounded_on_its_way_to_shards(alone: Ranks, tmp_path: Path):
    """Seen before: it was bfloat16 then, by which no float32 probability is multiplied: the first update ended."""
    path = make_tiny_model(tmp_path, architecture="qwen3_moe", dtype="bfloat16")
    networks, _ = _built(make_config(path, dtype="bfloat16", rollout={"routing_replay": True}), alone)
    routing = networks.policy.routing
    assert routing is not None
    row = replace(token_row([5, 6], [7, 8]), experts=np.tile(np.int16([0, 1]), (3, routing.num_layers, 1)))
    batch = lay_out([row], [0], layout=networks.policy.layout, width=2)
    assert batch.routes is not None
    routes = replace(batch.routes, num_rows_T=torch.full((3,), 257.0), pull_E=torch.full((routing.num_experts,), 1 / 3))
    networks(replace(batch, routes=routes))
    aux_loss = routing.aux_loss()
    assert aux_loss is not None
    # All probabilities of a position have the same pull, and are 1 together.
    assert float(aux_loss.detach()) == pytest.approx(routing.num_layers * 3 * 257 / 3, rel=1e-4)


def test_a_layer_within_a_layer_is_sharded(alone: Ranks, tmp_path: Path):
    """transformers names both of Mamba's as those that are not to be split."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 128, "initializer_range": 0.3}
    MambaForCausalLM(MambaConfig(**sizes)).save_pretrained(tmp_path)
    config = make_config(tmp_path)
    networks, loading = _built(config, alone)
    assert loading == "streamed"
    assert_equal(networks, _unsharded(config))


def test_shards_of_a_model_that_reads_the_mask_itself_need_padded_rows(alone: Ranks, tmp_path: Path):
    """Ranks that gather shards do not go on after an exception, to try padded rows."""
    reads_the_mask().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"DeepseekV32.* packed rows \(TypeError: .*use learner\.packing=padded"):
        _built(make_config(tmp_path), alone)


def test_shards_of_a_model_that_reads_the_mask_itself_are_padded_where_that_is_asked_for(alone: Ranks, tmp_path: Path):
    reads_the_mask().save_pretrained(tmp_path)
    networks, _ = _built(make_config(tmp_path, learner={"packing": "padded"}), alone)
    assert networks.policy.layout == "padded"


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


@pytest.mark.parametrize("kind", ["causal", "reward", "two-labels"])
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_critic_of_its_own_path_starts_from_that_models_weights(
    alone: Ranks, tmp_path: Path, kind: str, lora: dict[str, int] | None
):
    make = make_tiny_model if kind == "causal" else partial(make_tiny_reward_model, num_labels=1 + (kind != "reward"))
    own = make(tmp_path / "critic", hidden_size=32, seed=7)
    value = {"backbone": "own", "path": str(own)}
    config = make_config(
        make_tiny_model(tmp_path / "model"), algorithm={"advantage": "gae", "value": value}, learner={"lora": lora}
    )
    networks, loading = _built(config, alone)
    assert loading == "streamed"
    expected = _unsharded(config)
    assert_equal(networks, expected)
    stored = load_file(own / "model.safetensors")
    assert expected.critic is not None and expected.critic.backbone is not None
    for name, parameter in expected.critic.backbone.named_parameters():
        if ".lora_" not in name:
            assert torch.equal(parameter, stored[f"model.{name.replace('.base_layer.', '.')}"]), name
    head = expected.critic.value_head
    assert torch.equal(head.weight, stored["score.weight"] if kind == "reward" else torch.zeros(1, 32))
    assert not head.bias.any() and (expected.critic.head_start == "score") == (kind == "reward")


def test_a_reward_models_score_is_the_first_value_of_every_token(tmp_path: Path):
    own = make_tiny_reward_model(tmp_path / "critic")
    config = make_config(
        make_tiny_model(tmp_path / "model"), algorithm={"advantage": "gae", "value": {"path": str(own)}}
    )
    networks = _unsharded(config)
    row = token_row([5, 6, 7], [8, 9])
    batch = lay_out([row], [0], layout=networks.policy.layout, width=2, device="cpu")
    reward_model = AutoModelForSequenceClassification.from_pretrained(own)
    scores_C = [reward_model(torch.tensor([[5, 6, 7, 8][:length]])).logits[0, 0] for length in (3, 4)]
    values_C = networks(batch)[1]
    assert values_C is not None
    assert_close(values_C, torch.stack(scores_C), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "llama"}, "is a LlamaModel, the policy's backbone a Qwen3Model"),
        ({"vocab_size": 120}, "has embeddings of 120 tokens, the policy of 128"),
    ],
)
def test_a_critic_that_cannot_read_the_policys_rows_is_refused(tmp_path: Path, options: dict[str, Any], message: str):
    own = make_tiny_model(tmp_path / "critic", **options)
    config = make_config(
        make_tiny_model(tmp_path / "model"), algorithm={"advantage": "gae", "value": {"path": str(own)}}
    )
    with pytest.raises(ConfigError, match=message):
        _unsharded(config)


def test_a_model_that_lacks_weights_is_refused_instead_of_drawn(tmp_path: Path):
    own = make_tiny_model(tmp_path / "critic")
    weights = load_file(own / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, own / "model.safetensors", metadata={"format": "pt"})
    config = make_config(
        make_tiny_model(tmp_path / "model"), algorithm={"advantage": "gae", "value": {"path": str(own)}}
    )
    with pytest.raises(ConfigError, match=r"algorithm\.value\.path=.* lacks weights of a Qwen3Model: norm\.weight"):
        _unsharded(config)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_weights_of_another_shape_than_the_configuration_describes_are_refused(
    alone: Ranks, tmp_path: Path, is_sharded: bool
):
    path = make_tiny_model(tmp_path)
    config = json.loads((path / "config.json").read_text()) | {"vocab_size": 120}
    (path / "config.json").write_text(json.dumps(config))
    build_it = partial(_built, ranks=alone) if is_sharded else _unsharded
    with pytest.raises(
        ConfigError, match=r"stores .*embed_tokens\.weight in the shape \[128, 64\], .* describes \[120, 64\]"
    ):
        build_it(make_config(path))


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


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_a_sharded_critic_warms_up_on_normalised_returns_as_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backbone: str
):
    value = {"backbone": backbone, "warmup_steps": 1, "normalise_returns": True, "learning_rate": 1e-2}
    config = make_config(make_tiny_model(tmp_path / "model"), algorithm={"advantage": "gae", "value": value})
    expected = Learner(config)
    monkeypatch.setattr(Ranks, "join", lambda **_: _meet(tmp_path))
    sharded = Learner(config)
    for learner in (expected, sharded):
        for _ in range(2):
            learner.update(*(make_group(i) for i in range(3)))
    for name, parameter in sharded.networks.named_parameters():
        assert_close(whole(parameter.detach()), expected.networks.get_parameter(name).detach(), rtol=1e-4, atol=1e-6)
    sharded.close()


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_critic_that_explodes_does_not_move_the_policy_by_a_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_sharded: bool
):
    model, found = make_tiny_model(tmp_path / "model"), []
    for coefficient in (0.5, 2.0**30):
        folder = tmp_path / str(coefficient)
        folder.mkdir()
        if is_sharded:
            monkeypatch.setattr(Ranks, "join", lambda folder=folder, **_: _meet(folder))
        algorithm = {"advantage": "gae", "value": {"coefficient": coefficient}}
        learner = Learner(make_config(model, algorithm=algorithm))
        metrics = learner.update(*(make_group(i) for i in range(3))).metrics
        weights = [whole(parameter.detach()).clone() for parameter in learner.policy.parameters()]
        found.append((metrics["learner/gradient_norm"], metrics["learner/critic_gradient_norm"], weights))
        learner.close()
    (norm, critic_norm, weights), (other_norm, other_critic_norm, other_weights) = found
    assert norm == other_norm and other_critic_norm == pytest.approx(critic_norm * 2**31)
    assert all(torch.equal(weight, other) for weight, other in zip(weights, other_weights, strict=True))


def test_a_closed_learner_leaves_no_thread_of_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Ranks, "join", lambda **_: _meet(tmp_path))
    gc.collect()  # what earlier tests met in
    num_before = _num_group_threads()
    learner = Learner(make_config(make_tiny_model(tmp_path / "model")))
    learner.update(make_group(0))
    list(learner.publish())
    assert _num_group_threads() > num_before
    learner.close()
    # The kernel lists a thread for a moment after it was joined.
    until = time.monotonic() + 60
    while _num_group_threads() > num_before and time.monotonic() < until:
        time.sleep(0.01)
    assert _num_group_threads() <= num_before


def _num_group_threads() -> int:
    """Native threads of process groups in this process."""
    names: list[str] = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # another thread ended meanwhile
            names.append(path.read_text())
    return sum("gloo" in name or "tcpstore" in name for name in names)
