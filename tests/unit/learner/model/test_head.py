"""C positions, H hidden size, V vocabulary."""

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from learner.model import head as head_module
from learner.model import products
from learner.model.head import LEAST_REST, Head, selected_logprobs, top_tokens


@pytest.fixture(autouse=True)
def _tensors_on(device: torch.device) -> Iterator[None]:
    """All that tests here make, the head computes with on this device."""
    with device:
        yield


@pytest.fixture(params=["kept", "recomputed", "tiled"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The three ways through the vocabulary; each must give the same numbers."""
    if request.param != "kept":
        monkeypatch.setattr(head_module, "MAX_WHOLE_BYTES", 0)
    if request.param == "tiled":
        monkeypatch.setattr(head_module, "CPU_TILE_VOCABULARY", 4)
        monkeypatch.setattr(head_module, "GPU_TILE_VOCABULARY", 4)
    return request.param


@pytest.fixture(params=["bfloat16", "float32"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What bfloat16 factors are multiplied in on CPUs, whichever is faster on this one."""
    monkeypatch.setattr(head_module, "multiplies_in_float32", lambda: request.param == "float32")
    return request.param


HEADS = [
    Head(chunk_tokens=3),
    Head(chunk_tokens=3, temperature=0.7),
    Head(chunk_tokens=2, soft_cap=2.0, temperature=1.5),
    Head(chunk_tokens=100, scale=0.25, soft_cap=1.0),
    Head(chunk_tokens=3, temperature=0.7, top_k=4),
    Head(chunk_tokens=2, soft_cap=2.0, temperature=1.5, top_p=0.6),
    Head(chunk_tokens=3, min_p=0.2, top_k=6, top_p=0.8),
]


def _inputs(*, dtype: torch.dtype = torch.float64, bias: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    torch.manual_seed(0)
    hidden_CH, weight_VH = torch.randn(7, 5, dtype=dtype), torch.randn(11, 5, dtype=dtype)
    targets_C = torch.tensor([0, 10, 3, 4, 4, 8, 7])
    return hidden_CH, weight_VH, targets_C, torch.randn(11, dtype=dtype) if bias else None


def _engine_keeps(logits_CV: Tensor, head: Head) -> Tensor:
    """min_p, top_k and top_p one after the other, each on what the last one leaves, token by token."""
    probabilities_CV = logits_CV.softmax(1)
    kept_CV = probabilities_CV >= head.min_p * probabilities_CV.amax(1, keepdim=True)
    if head.top_k:
        left_CV = logits_CV.masked_fill(~kept_CV, -torch.inf)
        kept_CV &= left_CV >= left_CV.topk(head.top_k, 1).values[:, -1:]
    probabilities_CV = logits_CV.masked_fill(~kept_CV, -torch.inf).softmax(1)
    order_CV = probabilities_CV.argsort(1, descending=True)
    above_CV = probabilities_CV.gather(1, order_CV).cumsum(1) - probabilities_CV.gather(1, order_CV)
    return kept_CV & (above_CV < head.top_p).scatter(1, order_CV, above_CV < head.top_p)


def _dense_logprobs(
    hidden_CH: Tensor, weight_VH: Tensor, targets_C: Tensor, bias_V: Tensor | None, head: Head
) -> Tensor:
    logits_CV = hidden_CH @ weight_VH.t()
    logits_CV = logits_CV if bias_V is None else logits_CV + bias_V
    logits_CV = logits_CV * head.scale
    if head.soft_cap is not None:
        logits_CV = head.soft_cap * torch.tanh(logits_CV / head.soft_cap)
    logits_CV = logits_CV / head.temperature
    kept_CV = _engine_keeps(logits_CV, head).scatter(1, targets_C[:, None], True)
    return logits_CV.masked_fill(~kept_CV, -1e9).log_softmax(1)


def _dense(
    hidden_CH: Tensor, weight_VH: Tensor, targets_C: Tensor, bias_V: Tensor | None, head: Head
) -> tuple[Tensor, Tensor]:
    logprobs_CV = _dense_logprobs(hidden_CH, weight_VH, targets_C, bias_V, head)
    return logprobs_CV.gather(1, targets_C[:, None])[:, 0], -(logprobs_CV.exp() * logprobs_CV).sum(1)


def _assert_same_gradients(found: Sequence[Tensor], expected: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """For any upstream gradient: of all outputs, and of each by itself, as of a loss that leaves the others out."""
    for chosen in (range(len(found)), *([i] for i in range(len(found)))):
        upstream = [torch.randn_like(found[i]) for i in chosen]
        gradients = (
            torch.autograd.grad([outputs[i] for i in chosen], inputs, upstream, retain_graph=True)
            for outputs in (found, expected)
        )
        for got, wanted in zip(*gradients, strict=True):
            assert_close(got, wanted)


def test_even_logits_give_minus_log_v(layout: str):
    logprobs_C, entropies_C, _ = selected_logprobs(
        torch.zeros(2, 5), torch.randn(11, 5), torch.tensor([1, 9]), head=Head(), entropies=True
    )
    assert_close(logprobs_C, torch.full((2,), -math.log(11)))
    assert_close(entropies_C, torch.full((2,), math.log(11)))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("bias", [False, True])
def test_values_equal_the_dense_softmax(layout: str, head: Head, bias: bool):
    hidden_CH, weight_VH, targets_C, bias_V = _inputs(bias=bias)
    result = selected_logprobs(hidden_CH, weight_VH, targets_C, head=head, bias_V=bias_V, entropies=True)
    for got, expected in zip(result[:2], _dense(hidden_CH, weight_VH, targets_C, bias_V, head), strict=True):
        assert_close(got, expected)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("entropies", [False, True])
def test_gradients_are_right(layout: str, head: Head, entropies: bool):
    hidden_CH, weight_VH, targets_C, bias_V = _inputs()
    assert bias_V is not None
    inputs = [x.requires_grad_() for x in (hidden_CH, weight_VH, bias_V)]
    result = selected_logprobs(hidden_CH, weight_VH, targets_C, head=head, bias_V=bias_V, entropies=entropies)
    found = [x for x in result if x is not None]
    _assert_same_gradients(found, _dense(hidden_CH, weight_VH, targets_C, bias_V, head)[: len(found)], inputs)


def test_bfloat16_is_summed_in_float32(layout: str, product: str):
    hidden_CH, weight_VH, targets_C, _ = _inputs(dtype=torch.float32, bias=False)
    half = selected_logprobs(hidden_CH.bfloat16(), weight_VH.bfloat16(), targets_C, head=Head(chunk_tokens=2))[0]
    exact, _ = _dense(hidden_CH.bfloat16().float(), weight_VH.bfloat16().float(), targets_C, None, Head())
    assert half.dtype == torch.float32
    assert_close(half, exact)


def test_gradients_of_bfloat16_are_summed_in_float32_and_rounded_once(layout: str, product: str):
    torch.manual_seed(0)
    # As large as products of matrix units are; on CPUs that have none, float32 multiplies, which is nearer still.
    exact = [torch.randn(96, 64).bfloat16().double(), torch.randn(80, 64).bfloat16().double()]
    given = [x.bfloat16().requires_grad_() for x in exact]
    targets_C = torch.randint(80, (96,))
    logprobs_C = selected_logprobs(*given, targets_C, head=Head(chunk_tokens=40)).logprobs_C
    expected_C = selected_logprobs(*(x.requires_grad_() for x in exact), targets_C, head=Head()).logprobs_C
    assert_close(logprobs_C, expected_C.float(), rtol=2e-6, atol=2e-5)
    weights_C = torch.randn(96)
    (logprobs_C * weights_C).sum().backward()
    (expected_C * weights_C).sum().backward()
    for found, wanted in zip(given, exact, strict=True):
        assert found.grad is not None and wanted.grad is not None and found.grad.dtype == torch.bfloat16
        # bfloat16 rounds by a quarter of 2**-8 on average: each probability before the product, and the sum after it.
        error = (found.grad.double() - wanted.grad).abs()
        assert float((error / (wanted.grad.abs() + 0.1 * wanted.grad.abs().mean())).mean()) < 0.75 * 2**-8


class _Precisions(TorchDispatchMode):
    """Notes the precision that is set for each product of float32 factors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in func.overloadpacket.__name__ and args[0].dtype == torch.float32:
            self.seen.add(torch.backends.mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_factors_that_were_bfloat16_are_multiplied_as_bfloat16(
    monkeypatch: pytest.MonkeyPatch, layout: str, product: str, dtype: torch.dtype, device: torch.device
):
    if device.type == "cuda":
        pytest.skip("a GPU multiplies bfloat16 as it is")
    monkeypatch.setattr(products, "is_onednn_faster", lambda: False)  # its operator does not read the setting
    backend: Any = torch.backends.mkldnn
    before = backend.matmul.fp32_precision
    hidden_CH, weight_VH, targets_C, _ = _inputs(dtype=dtype, bias=False)
    with _Precisions() as precisions:
        logprobs_C, *_ = selected_logprobs(
            hidden_CH.requires_grad_(), weight_VH.requires_grad_(), targets_C, head=Head(chunk_tokens=3)
        )
        logprobs_C.sum().backward()
    is_as_bfloat16 = dtype == torch.bfloat16 and product == "bfloat16"
    assert precisions.seen == {"bf16" if is_as_bfloat16 else before} and backend.matmul.fp32_precision == before


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each tile of 4 tokens of logits that is made, how many others there are at that time."""
    for name, value in (("MAX_WHOLE_BYTES", 0), ("CPU_TILE_VOCABULARY", 4), ("GPU_TILE_VOCABULARY", 4)):
        monkeypatch.setattr(head_module, name, value)
    tiles, others = weakref.WeakSet[Tensor](), list[int]()
    logits = head_module._logits

    def watched(*args: Any, **more: Any) -> Tensor:
        others.append(len(tiles))
        tiles.add(tile := logits(*args, **more))
        return tile

    monkeypatch.setattr(head_module, "_logits", watched)
    return others


@pytest.mark.parametrize(("kept_bytes", "num_again"), [(0, 3), (223, 3), (224, 2), (500, 1), (10_000, 0)])
def test_logits_that_are_kept_are_not_made_again(made: list[int], kept_bytes: int, num_again: int):
    """Tiles of 7 positions by 4, 4 and 3 tokens, 224, 224 and 168 bytes."""
    hidden_CH, weight_VH, targets_C, _ = _inputs(bias=False)
    result = selected_logprobs(hidden_CH.requires_grad_(), weight_VH, targets_C, head=Head(kept_bytes=kept_bytes))
    result.logprobs_C.sum().backward()
    assert len(made) == 3 + num_again


def test_a_pass_without_gradients_keeps_no_logits(made: list[int]):
    hidden_CH, weight_VH, targets_C, _ = _inputs(bias=False)
    with torch.no_grad():
        head = Head(kept_bytes=10_000, chunk_tokens=4)
        selected_logprobs(hidden_CH, weight_VH.requires_grad_(), targets_C, head=head)
    # The one before, of two chunks for each of three tiles.
    assert made == [0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("dtype", "bias"), [(torch.float64, False), (torch.float64, True), (torch.bfloat16, False)])
def test_values_and_gradients_are_the_same_bits_whatever_is_kept(
    made: list[int], head: Head, bias: bool, dtype: torch.dtype
):
    found = list[list[Tensor]]()
    for kept_bytes in (0, 300, 10_000):
        inputs = [
            None if x is None else x.requires_grad_(x.is_floating_point()) for x in _inputs(dtype=dtype, bias=bias)
        ]
        hidden_CH, weight_VH, targets_C, bias_V = inputs
        assert hidden_CH is not None and weight_VH is not None and targets_C is not None
        kept = replace(head, kept_bytes=kept_bytes)
        logprobs_C, entropies_C, _ = selected_logprobs(
            hidden_CH, weight_VH, targets_C, head=kept, bias_V=bias_V, entropies=True
        )
        assert entropies_C is not None
        trained = [x for x in (hidden_CH, weight_VH, bias_V) if x is not None]
        loss = logprobs_C.sum() + 0.5 * entropies_C.square().sum()
        found.append([logprobs_C, entropies_C, *torch.autograd.grad(loss, trained)])
    again, *others = found
    assert all(torch.equal(one, other) for kept in others for one, other in zip(again, kept, strict=True))


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 11), (torch.bfloat16, 4)])
def test_a_weight_of_another_type_than_the_sums_is_converted_tile_by_tile(
    dtype: torch.dtype, largest: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    """Two positions' logits are small enough to be kept, 88 bytes; a weight of 11 tokens is 220 bytes in float32."""
    if device.type == "cuda":
        pytest.skip("a GPU multiplies bfloat16 as it is")
    monkeypatch.setattr(head_module, "MAX_WHOLE_BYTES", 100)
    monkeypatch.setattr(head_module, "CPU_TILE_VOCABULARY", 4)
    widths: list[int] = []
    logits = head_module._logits

    def watched(hidden_CH: Tensor, weight_VH: Tensor, *others: Any, **more: Any) -> Tensor:
        widths.append(weight_VH.shape[0])
        return logits(hidden_CH, weight_VH, *others, **more)

    monkeypatch.setattr(head_module, "_logits", watched)
    hidden_CH, weight_VH, targets_C, _ = _inputs(dtype=dtype, bias=False)
    selected_logprobs(hidden_CH[:2], weight_VH, targets_C[:2], head=Head())
    assert max(widths) == largest


def test_no_positions_give_no_log_probs_and_no_gradient(layout: str):
    _, weight_VH, _, _ = _inputs(bias=False)
    weight_VH.requires_grad_()
    hidden_CH = torch.zeros(0, 5, dtype=torch.float64, requires_grad=True)
    logprobs_C, entropies_C, _ = selected_logprobs(
        hidden_CH, weight_VH, torch.zeros(0, dtype=torch.int64), head=Head(), entropies=True
    )
    assert entropies_C is not None
    (logprobs_C.sum() + entropies_C.sum()).backward()
    assert logprobs_C.shape == (0,) and weight_VH.grad is not None and not weight_VH.grad.any()


def test_extreme_logits_stay_finite(layout: str):
    hidden_CH = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight_VH = torch.tensor([[1.0], [-1.0], [0.0]])
    logprobs_C, entropies_C, _ = selected_logprobs(
        hidden_CH, weight_VH, torch.tensor([0, 0]), head=Head(), entropies=True
    )
    assert entropies_C is not None
    (logprobs_C.sum() + entropies_C.sum()).backward()
    assert logprobs_C.tolist() == [0.0, -2e4] and entropies_C.tolist() == [0.0, 0.0]
    assert hidden_CH.grad is not None and hidden_CH.grad.isfinite().all()


def four() -> Tensor:
    """Logits of tokens with these probabilities."""
    return torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()


def _of_four(head: Head, target: int) -> tuple[float, float]:
    logprobs_C, entropies_C, _ = selected_logprobs(
        four(), torch.eye(4), torch.tensor([target]), head=head, entropies=True
    )
    assert entropies_C is not None
    return math.exp(logprobs_C.item()), entropies_C.item()


@pytest.mark.parametrize(
    "head",
    [
        Head(top_k=2),
        Head(top_p=0.6),  # 0.4 alone does not reach it
        Head(min_p=0.7),  # 0.3 is 0.75 times 0.4
        Head(min_p=0.3, top_k=3, top_p=0.7),  # of 4/9, 3/9 and 2/9 the first two reach 0.7
    ],
)
def test_a_truncated_softmax_is_over_the_tokens_that_are_sampled(layout: str, head: Head):
    probability, entropy = _of_four(head, 1)
    assert probability == pytest.approx(3 / 7)
    assert entropy == pytest.approx(-(4 / 7 * math.log(4 / 7) + 3 / 7 * math.log(3 / 7)))


def test_a_sampled_token_below_the_floor_counts_as_kept(layout: str):
    """The weights moved since: of 0.4 and 0.3 alone its probability would be 0, and its log-prob minus infinity."""
    assert _of_four(Head(top_k=2), 3)[0] == pytest.approx(1 / 8)


def test_a_dropped_token_has_no_gradient(layout: str):
    logits_CV = four().clone().requires_grad_()
    logprobs_C, *_ = selected_logprobs(logits_CV, torch.eye(4), torch.tensor([0]), head=Head(top_k=2))
    logprobs_C.sum().backward()
    assert_close(logits_CV.grad, torch.tensor([[3 / 7, -3 / 7, 0.0, 0.0]]))


def test_tokens_as_likely_as_the_last_kept_one_are_all_kept(layout: str):
    logprobs_C, *_ = selected_logprobs(torch.zeros(1, 3), torch.zeros(11, 3), torch.tensor([5]), head=Head(top_k=2))
    assert logprobs_C.item() == pytest.approx(-math.log(11))


def test_equally_likely_tokens_are_kept_however_the_second_pass_rounds(monkeypatch: pytest.MonkeyPatch):
    """Of 0.4, 0.3 and 0.3 the first two reach 0.5, and the last two are the same."""
    logits, shifts = head_module._logits, iter([1e-5, 0.0])
    monkeypatch.setattr(head_module, "_logits", lambda *args, **more: logits(*args, **more) + next(shifts))
    logprobs_C, *_ = selected_logprobs(
        torch.tensor([[0.4, 0.3, 0.3]]).log(), torch.eye(3), torch.tensor([0]), head=Head(top_p=0.5)
    )
    assert math.exp(logprobs_C.item()) == pytest.approx(0.4, rel=1e-4)


def test_more_than_all_tokens_truncate_nothing(layout: str):
    assert _of_four(Head(top_k=9), 3)[0] == pytest.approx(0.1)
    assert _of_four(Head(top_k=4), 3)[0] == pytest.approx(0.1)
    assert _of_four(Head(top_k=3), 1)[0] == pytest.approx(1 / 3)


def test_a_partition_has_the_candidates_and_all_others_as_one(layout: str):
    *_, partition_CP = selected_logprobs(
        four(), torch.eye(4), torch.tensor([0]), head=Head(), candidates_CK=torch.tensor([[3, 0]])
    )
    assert partition_CP is not None
    assert_close(partition_CP.exp(), torch.tensor([[0.1, 0.4, 0.5]]))


def test_a_partition_of_all_tokens_leaves_none(layout: str):
    logits_CV = four().clone().requires_grad_()
    *_, partition_CP = selected_logprobs(
        logits_CV, torch.eye(4), torch.tensor([0]), head=Head(), candidates_CK=torch.tensor([[3, 0, 1, 2]])
    )
    assert partition_CP is not None
    assert_close(partition_CP.exp(), torch.tensor([[0.1, 0.4, 0.3, 0.2, 0.0]]))
    assert partition_CP[0, 4].item() == pytest.approx(math.log(LEAST_REST))
    partition_CP[0, 4].backward()
    assert_close(logits_CV.grad, -four().exp())


@pytest.mark.parametrize("head", [head for head in HEADS if not head.truncates])
@pytest.mark.parametrize("entropies", [False, True])
def test_a_partition_and_its_gradient_are_right(layout: str, head: Head, entropies: bool):
    hidden_CH, weight_VH, targets_C, bias_V = _inputs()
    assert bias_V is not None
    candidates_CK = torch.stack([targets_C, (targets_C + 3) % 11, (targets_C + 7) % 11], 1)

    inputs = [x.requires_grad_() for x in (hidden_CH, weight_VH, bias_V)]
    logprobs_C, entropies_C, partition_CP = selected_logprobs(
        hidden_CH, weight_VH, targets_C, head=head, bias_V=bias_V, entropies=entropies, candidates_CK=candidates_CK
    )
    assert partition_CP is not None
    logprobs_CV = _dense_logprobs(hidden_CH, weight_VH, targets_C, bias_V, head)
    others_C = logprobs_CV.exp().scatter(1, candidates_CK, 0.0).sum(1)
    expected_CP = torch.cat([logprobs_CV.gather(1, candidates_CK), others_C.log()[:, None]], 1)
    assert_close(partition_CP, expected_CP)
    dense_C, dense_entropies_C = _dense(hidden_CH, weight_VH, targets_C, bias_V, head)
    found, expected = [logprobs_C, partition_CP], [dense_C, expected_CP]
    if entropies_C is not None:
        found, expected = [*found, entropies_C], [*expected, dense_entropies_C]
    _assert_same_gradients(found, expected, inputs)


@pytest.mark.parametrize("head", [head for head in HEADS if head.truncates])
def test_a_deterministic_run_truncates_alike(head: Head):
    """torch refuses what has no fixed order on a GPU, a running sum over the vocabulary among it."""
    hidden_CH, weight_VH, targets_C, bias_V = _inputs()
    expected = selected_logprobs(hidden_CH, weight_VH, targets_C, head=head, bias_V=bias_V, entropies=True)
    torch.use_deterministic_algorithms(True)
    try:
        weight_VH.requires_grad_()
        found = selected_logprobs(hidden_CH, weight_VH, targets_C, head=head, bias_V=bias_V, entropies=True)
        found.logprobs_C.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert_close(found.logprobs_C, expected.logprobs_C)
    assert_close(found.entropies_C, expected.entropies_C)


def test_a_head_that_drops_tokens_has_no_candidates():
    with pytest.raises(ValueError, match="this head drops some"):
        selected_logprobs(
            four(), torch.eye(4), torch.tensor([0]), head=Head(top_k=2), candidates_CK=torch.tensor([[0, 1]])
        )


def test_the_likeliest_tokens_come_first_and_there_are_no_more_than_the_vocabulary_has():
    assert top_tokens(four().flip(1), torch.eye(4), num_tokens=2, head=Head()).tolist() == [[3, 2]]
    assert top_tokens(four(), torch.eye(4), num_tokens=9, head=Head()).tolist() == [[0, 1, 2, 3]]
    bias_V = torch.tensor([0.0, 0.0, 0.0, 9.0])
    assert top_tokens(four(), torch.eye(4), num_tokens=2, head=Head(), bias_V=bias_V).tolist() == [[3, 0]]
