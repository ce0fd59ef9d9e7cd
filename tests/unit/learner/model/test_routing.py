"""Recorded experts take the place of the routers' choice, and of nothing else."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers.models.afmoe.modeling_afmoe import AfmoeTokenChoiceRouter
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter, load_balancing_loss_func

from cluster.contracts.config import LearnerConfig, ModelConfig, SamplingConfig
from cluster.contracts.errors import ConfigError
from learner.algorithms.objective.statistics import Statistics
from learner.model.attention import PACKED
from learner.model.packing import Layout, TokenRow, lay_out
from learner.model.policy import PolicyModel, load, unproven
from learner.model.routing import Routes, Routing
from tests.models import make_tiny_model

LAYOUTS: tuple[Layout, ...] = ("shared", "packed", "padded")


class _Mixture(nn.Module):
    """A model of one layer that is a router alone."""

    def __init__(self, router: nn.Module, config: SimpleNamespace) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([nn.ModuleDict({"gate": router})])
        self.config: Any = SimpleNamespace(get_text_config=lambda: config)


def _router(kind: type[nn.Module] = Qwen3MoeTopKRouter, **changed: Any) -> tuple[Any, Routing]:
    """Three experts of which two are chosen, for hidden states of two numbers."""
    config = SimpleNamespace(
        num_hidden_layers=1, num_experts=3, num_local_experts=3, num_experts_per_tok=2, hidden_size=2, norm_topk_prob=True,
        routed_scaling_factor=1.0, n_group=1, topk_group=1, topk_method="greedy",
    )  # fmt: skip
    vars(config).update(changed)
    router = kind(config)
    nn.init.zeros_(router.weight)  # type: ignore[arg-type]
    mixture: Any = _Mixture(router, config)
    return router, Routing(mixture)


def _routes(*experts: list[int], recorded: list[bool] | None = None) -> Routes:
    return Routes(
        experts_TLK=torch.tensor(experts, dtype=torch.int16)[:, None, :],
        num_rows_T=torch.tensor(recorded or [True] * len(experts)).float(),
    )


def _gates(answer: tuple[Tensor, ...]) -> list[dict[int, float]]:
    """Of each position: expert to gate value."""
    # Beside logits of all experts; families return the three in different orders.
    (indices_TK,) = (each for each in answer if not each.is_floating_point())
    (weights_TK,) = (each for each in answer if each.is_floating_point() and each.shape == indices_TK.shape)
    of_each = zip(indices_TK.tolist(), weights_TK.tolist(), strict=True)
    return [dict(zip(*each, strict=True)) for each in of_each]


def test_gate_values_are_of_the_recorded_experts_and_sum_to_one():
    # Logits 0, ln 2 and ln 3: the router would choose experts 2 and 1, with 3/5 and 2/5. Experts 0 and 2 have 1/4 and 3/4.
    router, routing = _router()
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[0.0, 0.0], [np.log(2.0), 0.0], [np.log(3.0), 0.0]]))
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    (own, _) = _gates(router(x))
    assert own == pytest.approx({2: 0.6, 1: 0.4})
    routing.follow(_routes([0, 2], [0, 1], recorded=[True, False]))
    replayed, unrecorded = _gates(router(x))
    assert replayed == pytest.approx({0: 0.25, 2: 0.75})
    assert unrecorded == pytest.approx({2: 0.6, 1: 0.4}), "nothing was recorded there"
    # Of the choices that were recorded one in two is not the router's: expert 0.
    assert routing.statistics().compute() == {"routing_differs": 0.5}
    routing.follow(None)
    assert _gates(router(x))[0] == own
    assert routing.statistics().compute() == {}


def test_a_choice_that_several_rows_recorded_counts_for_each_of_them():
    """Of experts 0 and 2 one is not the router's, of 1 and 2 none. Three rows share the first position: 3/8 of their choices differ."""
    router, routing = _router()
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]]))
    routing.follow(replace(_routes([0, 2], [1, 2]), num_rows_T=torch.tensor([3.0, 1.0])))
    router(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    assert routing.statistics().compute() == {"routing_differs": 0.375}


def test_the_gradient_is_that_of_the_softmax_over_the_recorded_experts():
    """Of gate g₀ = e^a/(e^a + e^c), with a = w₀·x and c = w₂·x: g₀(1 − g₀)x for w₀, minus that for w₂, and nothing for w₁."""
    router, routing = _router()
    router.double()
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[0.0, 0.0], [5.0, 5.0], [np.log(3.0), 0.0]]))
    routing.follow(_routes([0, 2]))
    _, gates, _ = router(torch.tensor([[1.0, 2.0]], dtype=torch.float64))
    gates[0, 0].backward()
    # x = (1, 2): a = 0 and c = ln 3, so g₀ = 1/4.
    expected = torch.tensor([[3 / 16, 6 / 16], [0, 0], [-3 / 16, -6 / 16]], dtype=torch.float64)
    assert_close(router.weight.grad, expected, rtol=1e-6, atol=1e-7)  # the router's softmax is of float32


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        (Qwen3MoeTopKRouter, {"norm_topk_prob": False}),
        (DeepseekV2TopkRouter, {}),
        (DeepseekV3TopkRouter, {}),
        (DeepseekV3TopkRouter, {"num_local_experts": 4, "n_group": 2}),
        (GptOssTopKRouter, {}),
        (GraniteMoeTopKRouter, {}),
    ],
)
def test_routers_of_other_families_keep_their_scores(kind: type[nn.Module], changed: dict[str, Any]):
    """Replaying a router's own choice, in another order, changes nothing; another choice is followed."""
    torch.manual_seed(0)
    router, routing = _router(kind, **changed)
    nn.init.normal_(router.weight)
    x = torch.randn(5, 2)
    own = _gates(router(x))
    routing.follow(_routes(*([*gates][::-1] for gates in own)))
    for gates, expected in zip(_gates(router(x)), own, strict=True):
        assert gates == pytest.approx(expected)
    assert routing.statistics().compute() == {"routing_differs": 0.0}
    routing.follow(_routes(*([0, 1],) * 5))
    assert [{*gates} for gates in _gates(router(x))] == [{0, 1}] * 5


def test_a_router_that_chooses_in_another_way_is_refused():
    class SortingRouter(Qwen3MoeTopKRouter):
        def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
            scores = (hidden_states @ self.weight.T).softmax(-1)
            chosen = scores.argsort(-1, descending=True)[:, :2]
            return scores, scores.gather(-1, chosen), chosen

    with pytest.raises(ConfigError, match="a SortingRouter chooses its experts in an unsupported way"):
        _router(SortingRouter)


def test_a_router_that_takes_more_than_hidden_states_is_refused():
    class BiasedRouter(Qwen3MoeTopKRouter):
        def forward(self, hidden_states: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
            return super().forward(hidden_states + bias)

    with pytest.raises(ConfigError, match="a BiasedRouter chooses its experts in an unsupported way"):
        _router(BiasedRouter)


def test_a_router_whose_weight_is_in_a_layer_of_its_own_is_refused():
    """That of AFMoE, which takes a bias of the experts too. Nothing of it is read by the name `weight`."""
    router = AfmoeTokenChoiceRouter(
        SimpleNamespace(num_experts_per_tok=2, num_experts=3, hidden_size=2, route_scale=1.0, route_norm=True)
    )
    config = SimpleNamespace(num_hidden_layers=1)
    mixture: Any = _Mixture(router, config)
    with pytest.raises(ConfigError, match="a AfmoeTokenChoiceRouter chooses its experts in an unsupported way"):
        Routing(mixture)


def test_where_all_experts_are_chosen_the_load_balance_loss_is_its_coefficient():
    """Each of 3 experts has all positions: 0.5 · E Σ f P with f = 1 is 0.5 · 3 · 1."""
    router, routing = _router(num_experts_per_tok=3)
    experts = np.array([[[0, 1, 2]], [[2, 1, 0]]])
    routes = _routes([0, 1, 2], [2, 1, 0])
    routing.follow(replace(routes, pull_E=routing.pull([experts], coefficient=0.5)))
    router(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    found = routing.aux_loss()
    assert found is not None and found.item() == pytest.approx(1.5)


def test_a_dense_model_is_refused(tmp_path: Path):
    dense = load(ModelConfig(path=str(make_tiny_model(tmp_path)), dtype="float32"), dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"routing_replay=true: Qwen3ForCausalLM has no router"):
        Routing(dense)


@pytest.fixture(scope="module")
def model_path_of_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("moe"), architecture="qwen3_moe")


def _policy(path: Path) -> PolicyModel:
    causal_lm = load(ModelConfig(path=str(path), dtype="float32"), dtype=torch.float64)
    causal_lm.set_experts_implementation("eager")  # torch's grouped product of experts knows no float64
    learner = LearnerConfig()
    return unproven(
        causal_lm, sampling=SamplingConfig(), head_chunk_tokens=learner.head_chunk_tokens, replays_routing=True
    )


def _rows(*experts: np.ndarray | None) -> list[TokenRow]:
    """Two completions of one prompt and one of another."""
    texts = [([5, 6, 7], [8, 9, 10, 11]), ([5, 6, 7], [20, 21]), ([9], [4, 30, 31])]
    return [
        TokenRow(
            prompt=np.array(prompt), completion=np.array(completion), loss_mask=np.ones(len(completion), np.bool_),
            experts=recorded,
        )
        for (prompt, completion), recorded in zip(texts, experts, strict=True)
    ]  # fmt: skip


def _drawn(seed: int) -> list[np.ndarray]:
    """Two different experts of eight at every position and layer; those of a shared prompt are equal."""
    random = np.random.default_rng(seed)
    drawn = [random.permuted(np.tile(np.arange(8, dtype=np.uint8), (6, 2, 1)), axis=-1)[..., :2] for _ in range(3)]
    drawn[1][:3] = drawn[0][:3]
    return [drawn[0][:6], drawn[1][:4], drawn[2][:3]]


def _computed(policy: PolicyModel, rows: list[TokenRow], layout: Layout) -> tuple[Tensor, dict[str, Tensor]]:
    policy.causal_lm.set_attn_implementation("sdpa" if layout == "padded" else PACKED)
    policy.zero_grad()
    batch = lay_out(rows, range(len(rows)), layout=layout, width=4)
    logprobs = batch.scatter(policy(batch).logprobs_C)
    (logprobs * torch.linspace(-1, 2, 4)).sum().backward()
    gradient = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    return logprobs.detach(), gradient


def test_routes_reach_their_tokens_in_every_layout(model_path_of_moe: Path):
    """Also where activations are computed again in the backward pass, and where a row of three has no record."""
    policy = _policy(model_path_of_moe)
    own, _ = _computed(policy, _rows(None, None, None), "padded")
    drawn = _drawn(0)
    rows = _rows(drawn[0], drawn[1], None)
    expected, expected_gradient = _computed(policy, rows, "padded")
    assert float((expected - own)[:2].abs().amax(1).min()) > 0.1, "drawn experts are others than the routers'"
    assert_close(expected[2], own[2], rtol=1e-6, atol=1e-9)
    policy.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    for is_checkpointed in (False, True):
        policy.train(is_checkpointed)
        for layout in LAYOUTS:
            found, gradient = _computed(policy, rows, layout)
            assert_close(found, expected, rtol=1e-6, atol=1e-9)
            for name, value in expected_gradient.items():
                # Norms and rotations are float32 inside, even in a float64 model.
                assert_close(gradient[name], value, rtol=1e-3, atol=1e-5)
    # The model's own forward follows none of them.
    assert policy.own_logits(torch.arange(5, 9)).shape == (4, 128)


def test_routes_are_those_of_one_row_for_a_shared_prompt_and_of_no_padding():
    drawn = _drawn(1)
    rows = _rows(*drawn)
    shared = lay_out(rows, [0, 1, 2], layout="shared", width=4).routes
    assert shared is not None
    expected = np.concatenate([drawn[0], drawn[1][3:], drawn[2]])
    assert (shared.experts_TLK.numpy() == expected).all() and bool(shared.is_recorded_T.all())
    padded = lay_out(rows, [1, 2], layout="padded", width=4).routes
    assert padded is not None and padded.is_recorded_T.tolist() == [True] * 7 + [False]
    assert lay_out(_rows(None, None, None), [0, 1], layout="shared", width=4).routes is None
    second = lay_out(_rows(None, *drawn[1:]), [0, 1, 2], layout="shared", width=4).routes
    assert second is not None and second.is_recorded_T.tolist() == [True] * 3 + [False] * 3 + [True] * 4


def _balance(policy: PolicyModel, rows: list[TokenRow], *passes: list[int], layout: Layout) -> tuple[float, Tensor]:
    """The load-balance loss of these rows, times 0.5, from these passes, and its gradient for the first layer's router."""
    routing = policy.routing
    assert routing is not None
    pull_E = routing.pull([row.experts for row in rows if row.experts is not None], coefficient=0.5)
    policy.causal_lm.set_attn_implementation("sdpa" if layout == "padded" else PACKED)
    policy.zero_grad()
    total = 0.0
    for chosen in passes:
        batch = lay_out(rows, chosen, layout=layout, width=4)
        assert batch.routes is not None
        policy(replace(batch, routes=replace(batch.routes, pull_E=pull_E)))
        loss = routing.aux_loss()
        assert loss is not None
        loss.backward()
        total += float(loss.detach())
        found = routing.statistics().compute()
        assert found["router_aux_loss"] == found["loss"] == float(loss.detach())
    return total, policy.causal_lm.get_parameter("model.layers.0.mlp.gate.weight").grad.clone()  # type: ignore[union-attr]


def test_the_load_balance_loss_is_that_of_transformers_however_rows_are_laid_out(model_path_of_moe: Path):
    """Where the recorded choices are the routers' own. Nothing but the layout differs: passes, shared prompts, padding, recomputation."""
    policy, texts = _policy(model_path_of_moe), _rows(None, None, None)
    logits: list[list[Tensor]] = [[], []]
    own, half_own = list[np.ndarray](), list[np.ndarray]()
    for row in texts:
        ids = torch.from_numpy(np.concatenate([row.prompt, row.completion[:-1]]))[None]
        found = policy.causal_lm(input_ids=ids, output_router_logits=True).router_logits
        for of_layer, each in zip(logits, found, strict=True):
            of_layer.append(each)
        own.append(torch.stack([each.topk(2).indices for each in found], 1).numpy().astype(np.uint8))
        half_own.append(own[-1].copy())
        half_own[-1][:, 1] = found[1].topk(2, largest=False).indices.numpy()
    rows = _rows(*own)
    expected = 0.5 * load_balancing_loss_func(tuple(torch.cat(each) for each in logits), num_experts=8, top_k=2)
    assert isinstance(expected, Tensor)
    policy.zero_grad()
    expected.backward()
    gradient = policy.causal_lm.get_parameter("model.layers.0.mlp.gate.weight").grad
    assert gradient is not None and float(gradient.abs().max()) > 1e-4
    gradient = gradient.clone()
    policy.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    for is_checkpointed in (False, True):
        policy.train(is_checkpointed)
        for layout in LAYOUTS:
            for passes in ([[0, 1, 2]], [[0, 1], [2]], [[2], [0], [1]]):
                loss, found = _balance(policy, rows, *passes, layout=layout)
                assert loss == pytest.approx(float(expected), rel=1e-5)
                assert_close(found, gradient, rtol=1e-3, atol=1e-6)
    # No choice of the second layer is its router's.
    _computed(policy, _rows(*half_own), "shared")
    assert policy.routing is not None and policy.routing.statistics().compute() == {"routing_differs": 0.5}


def test_the_share_of_choices_that_differ_is_the_same_in_every_layout(model_path_of_moe: Path):
    policy, rows = _policy(model_path_of_moe), _rows(*_drawn(0))
    routing = policy.routing
    assert routing is not None
    shares = list[float]()
    for layout in LAYOUTS:
        policy.causal_lm.set_attn_implementation("sdpa" if layout == "padded" else PACKED)
        for passes in ([[0, 1, 2]], [[0, 1], [2]], [[0], [1, 2]]):
            found = list[Statistics]()
            for chosen in passes:
                policy(lay_out(rows, chosen, layout=layout, width=4))
                found.append(routing.statistics())
            shares.append(Statistics.merge(found).compute()["routing_differs"])
    assert 0.5 < shares[0] < 0.95 and shares == pytest.approx([shares[0]] * 9, abs=1e-12)


def test_activations_that_are_computed_again_are_not_kept_for_the_load_balance_loss(model_path_of_moe: Path):
    policy, rows = _policy(model_path_of_moe), _rows(*_drawn(0))
    routing = policy.routing
    assert routing is not None
    policy.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train()
    batch = lay_out(rows, [0, 1, 2], layout="padded", width=4)
    assert batch.routes is not None
    policy.causal_lm.set_attn_implementation("sdpa")
    policy(replace(batch, routes=replace(batch.routes, pull_E=torch.ones(8))))
    losses = [router.aux_loss for router in routing._routers]
    loss = routing.aux_loss()
    assert loss is not None
    loss.backward()
    assert all(router.aux_loss is loss for router, loss in zip(routing._routers, losses, strict=True))


def test_balanced_experts_lose_their_number_per_token_and_a_favourite_more():
    router, routing = _router(num_experts=4, num_local_experts=4)
    x = torch.zeros(2, 2)
    for experts, expected in (([[0, 1], [2, 3]], 2.0), ([[0, 1], [0, 1]], 2.0)):
        # The second layer is dense, and what is recorded for it counts for nothing.
        recorded = np.stack([experts, [[3, 3], [3, 3]]], 1)
        routes = replace(_routes(*experts), pull_E=routing.pull([recorded], coefficient=1.0))
        routing.follow(routes)
        router(x)  # equal logits: each expert has a quarter of the probability, whatever was chosen
        assert float(routing.aux_loss()) == pytest.approx(expected)  # type: ignore[arg-type]
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[50.0, 0.0], [50.0, 0.0], [0.0, 0.0], [0.0, 0.0]]))
    routing.follow(routes)
    router(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    # f = (1, 1, 0, 0) and P = (1/2, 1/2, 0, 0): 4 · 1.
    assert float(routing.aux_loss()) == pytest.approx(4.0)  # type: ignore[arg-type]
    assert routing.pull([], coefficient=1.0) is None
