"""Every loss, correction and KL term at log-probs down to -200, through a run's objective in float32, against 300 digits of mpmath.

The truths are the formulas of docs/algorithms.md, written out. A gradient beyond float32 is inf, of the right sign; one below it is 0.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import mpmath
import pytest
import torch
from mpmath import mpf
from torch import Tensor

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.plugins import names
from learner.algorithms.objective import Objective
from learner.algorithms.objective.batch import BatchTensors
from learner.algorithms.registry.homes import HOMES

mpmath.mp.dps = 300
LOGPROBS = [-1e-4, -0.5, -1.0, -19.0, -90.0, -110.0, -200.0]
LARGEST = torch.finfo(torch.float32).max
Row = Sequence[Any]
Truth = Callable[..., Any]
"""Loss of a row. Log-probs: x of the policy, f of it without a gradient, o of π_old, m of μ, r of the reference; a: the advantage."""

_exp, _mean, _clip = mpmath.exp, lambda xs: mpmath.fsum(xs) / len(xs), lambda x, low, high: min(max(x, low), high)
_LOW, _HIGH = mpmath.log(mpf("0.8")), mpmath.log(mpf("1.2"))


def per_token(loss: Truth) -> Truth:
    return lambda x, f, o, m, r, a: mpmath.fsum(loss(*each, a) for each in zip(x, f, o, m, r, strict=True))


def _ppo(ratio: Any, a: Any, low: Any, high: Any) -> Any:
    return -min(_exp(ratio) * a, _exp(_clip(ratio, low, high)) * a)


def _sapo(x: Any, f: Any, o: Any, m: Any, r: Any, a: Any) -> Any:
    tau = mpf(1) if a > 0 else mpf("1.05")
    return -4 / tau * a / (1 + _exp(-tau * (_exp(x - o) - 1)))


def _dppo(x: Any, f: Any, o: Any, m: Any, r: Any, a: Any) -> Any:
    moved = _exp(f) - _exp(m)
    return mpf(0) if abs(moved) > mpf("0.2") and moved * a > 0 else -_exp(x - m) * a


def _gspo(x: Row, f: Row, o: Row, m: Row, r: Row, a: Any) -> Any:
    ratio = _mean([p - q for p, q in zip(x, o, strict=True)])
    return len(x) * _ppo(ratio, a, mpmath.log(1 - mpf("3e-4")), mpmath.log(1 + mpf("4e-4")))


def _gspo_token(x: Row, f: Row, o: Row, m: Row, r: Row, a: Any) -> Any:
    ratio = _mean([p - q for p, q in zip(f, o, strict=True)])
    bounds = mpmath.log(1 - mpf("3e-4")), mpmath.log(1 + mpf("4e-4"))
    return mpmath.fsum(_ppo(ratio + p - q, a, *bounds) for p, q in zip(x, f, strict=True))


def _gmpo(x: Row, f: Row, o: Row, m: Row, r: Row, a: Any) -> Any:
    sign, limit = (1 if a > 0 else -1), mpf("0.4")
    held = [sign * min(sign * (p - q), sign * _clip(p - q, -limit, limit)) for p, q in zip(x, o, strict=True)]
    return -len(x) * a * _exp(_mean(held))


def _vespo(x: Row, f: Row, o: Row, m: Row, r: Row, a: Any) -> Any:
    total, (k, decay) = mpmath.fsum(f) - mpmath.fsum(m), ((2, 3) if a > 0 else (3, 2))
    return -_exp(k * total + decay * (1 - _exp(min(total, 1000)))) * a * mpmath.fsum(x)


LOSSES: dict[str, Truth] = {
    "ppo_clip": per_token(lambda x, f, o, m, r, a: _ppo(x - o, a, _LOW, _HIGH)),
    "clipped_ratio": per_token(lambda x, f, o, m, r, a: -_exp(_clip(x - o, _LOW, _HIGH)) * a),
    "importance_sampling": per_token(lambda x, f, o, m, r, a: -_exp(x - o) * a),
    "reinforce": per_token(lambda x, f, o, m, r, a: -x * a),
    "cispo": per_token(lambda x, f, o, m, r, a: -_exp(min(f - o, mpmath.log(5))) * a * x),
    "cpgd": per_token(lambda x, f, o, m, r, a: -min((x - o) * a, _clip(x - o, _LOW, _HIGH) * a)),
    "sapo": per_token(_sapo),
    "dppo": per_token(_dppo),
    "dro": per_token(lambda x, f, o, m, r, a: -x * a + (x - o) ** 2 / 2),
    "gspo": _gspo,
    "gspo_token": _gspo_token,
    "gmpo": _gmpo,
    "vespo": _vespo,
}
WITHOUT_OLD = ("reinforce", "dppo", "vespo")
OF_THE_BATCH = {"clip_cov": "ppo_clip", "kl_cov": "importance_sampling"}
"""One token of the batch, that of the highest covariance, differs from the loss on the right."""


def _all(rows: Row, others: Row) -> list[Any]:
    return [p - q for p, q in zip(rows, others, strict=True)]


CORRECTIONS: dict[str, tuple[dict[str, Any], Truth]] = {
    "tis": ({}, lambda o, m, x, a: [_exp(min(d, mpmath.log(2))) for d in _all(o, m)]),
    "self_normalised_tis": ({}, lambda o, m, x, a: [_exp(min(d, mpmath.log(2))) for d in _all(o, m)]),
    "decoupled": ({}, lambda o, m, x, a: [_exp(d) for d in _all(o, m)]),
    "icepop": ({}, lambda o, m, x, a: [_exp(d) if mpf("0.5") <= _exp(d) <= 5 else mpf(0) for d in _all(o, m)]),
    "sequence_mask": (
        {},
        lambda o, m, x, a: [mpf(mpf("0.99") <= _exp(_mean(_all(o, m))) <= mpf("1.01"))] * len(o),
    ),
    "rejection": ({"high": 0.5}, lambda o, m, x, a: [mpf(_exp(d) - 1 - d <= mpf("0.5")) for d in _all(o, m)]),
    "opsm": ({}, lambda o, m, x, a: [mpf(not (a < 0 and _mean(_all(m, x)) > mpf("0.1")))] * len(o)),
}


def _k3(d: Any) -> Any:
    return _exp(-d) + d - 1


TERMS: dict[str, Truth] = {
    "loss.k2": per_token(lambda x, f, o, m, r, a: (x - r) ** 2 / 2),
    "loss.k3": per_token(lambda x, f, o, m, r, a: _k3(x - r)),
    "loss.unbiased": per_token(lambda x, f, o, m, r, a: _exp(x - m) * _k3(x - r)),
    "rollout.k2": per_token(lambda x, f, o, m, r, a: (x - m) ** 2 / 2),
    "rollout.k3": per_token(lambda x, f, o, m, r, a: _k3(x - m)),
    "rollout.unbiased": per_token(lambda x, f, o, m, r, a: _exp(x - m) * _k3(x - m)),
    "rollout.drift": per_token(lambda x, f, o, m, r, a: _k3(m - x)),
}


def as_given(token_rewards_NT: Tensor) -> Tensor:
    """Advantages that the test states travel as rewards per token."""
    return token_rewards_NT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of two tokens, in float32, which mpmath reads exactly."""

    policy: Tensor
    old: Tensor
    rollout: Tensor
    reference: Tensor
    advantages: Tensor

    def batch(self) -> BatchTensors:
        num, width = self.policy.shape
        return BatchTensors(
            loss_mask_NT=torch.ones(num, width, dtype=torch.bool),
            rollout_logprobs_NT=self.rollout,
            policy_versions_NT=torch.zeros(num, width, dtype=torch.int64),
            rewards_N=torch.zeros(num),
            group_index_N=torch.arange(num),
            truncated_N=torch.zeros(num, dtype=torch.bool),
            completion_lengths_N=torch.full((num,), width),
            trajectory_ids=[f"t{i}" for i in range(num)],
            group_ids=[f"g{i}" for i in range(num)],
            prompt_ids=[f"p{i}" for i in range(num)],
            current_version=0,
            reference_logprobs_NT=self.reference,
            proximal_logprobs_NT=self.old,
            token_rewards_NT=self.advantages[:, None].expand(num, width).contiguous(),
        )

    def computed(self, **algorithm: Any) -> tuple[Tensor, Tensor]:
        """Loss per row, and the gradient of the log-probs, of a run that adds up its tokens. A weight's gradient is its token's loss."""
        given = {"advantage": f"{__name__}:as_given", "aggregation": "sum"} | algorithm
        made = Objective.from_config(AlgorithmConfig.model_validate(given), updates_per_step=2)
        prepared = made.prepare(self.batch())
        weights = prepared.weights_NT.clone().requires_grad_()
        policy = self.policy.clone().requires_grad_()
        prepared = dataclasses.replace(prepared, weights_NT=weights, policy_weights_NT=weights)
        losses, gradient = torch.autograd.grad(made.loss(prepared, policy_logprobs_BT=policy).loss, [weights, policy])
        return losses.sum(1), gradient

    def true(self, truth: Truth) -> tuple[list[Any], list[list[Any]]]:
        values, gradients = [], []
        every = (self.policy, self.old, self.rollout, self.reference)
        for row in range(len(self.policy)):
            x, o, m, r = ([mpf(each) for each in tensor[row].tolist()] for tensor in every)
            a = mpf(self.advantages[row].item())
            values.append(truth(x, x, o, m, r, a))
            slopes = []
            for token in range(len(x)):
                step = mpf(10) ** -60
                up, down = ([p + h * (t == token) for t, p in enumerate(x)] for h in (step, -step))
                slopes.append((truth(up, x, o, m, r, a) - truth(down, x, o, m, r, a)) / (2 * step))
            gradients.append(slopes)
        return values, gradients


def rows(seed: int, *, num: int = 80, advantage: float | None = None) -> Rows:
    """Every pair of log-probs meets; near-equal ones too, where a difference cancels."""
    generator = torch.Generator().manual_seed(seed)
    combined = torch.tensor(list(itertools.product(LOGPROBS, repeat=4)))
    drawn = combined[torch.randint(len(combined), (num, 2), generator=generator)].double()
    near = torch.randint(2, (num, 2, 4), generator=generator).bool()
    first = drawn[..., :1].expand_as(drawn)
    noise = 1 + 0.003 * torch.randn(num, 2, 4, generator=generator, dtype=torch.float64)
    drawn = torch.where(near, first * noise, drawn).clamp(max=-1e-5).float()
    sign = torch.where(torch.rand(num, generator=generator) < 0.5, -1.5, 0.75)
    advantages = sign if advantage is None else torch.full((num,), advantage)
    policy, old, rollout, reference = drawn.unbind(-1)
    return Rows(policy=policy, old=old, rollout=rollout, reference=reference, advantages=advantages)


def wrong(got: Tensor, wanted: Sequence[Any], *, largest: float) -> list[tuple[int, float, str]]:
    found = []
    for place, (mine, truth) in enumerate(zip(got.flatten().tolist(), wanted, strict=True)):
        if abs(truth) > largest:
            is_right = mine == math.copysign(math.inf, truth)
        else:
            is_right = (
                abs(mpf(mine) - truth) <= mpf("1e-4") * abs(truth) + mpf("1e-37") if math.isfinite(mine) else False
            )
        if not is_right:
            found.append((place, mine, mpmath.nstr(truth, 8)))
    return found


def check(drawn: Rows, truth: Truth, *, but: int = 0, **algorithm: Any) -> None:
    """`but` is how many tokens may differ."""
    losses, gradient = drawn.computed(**algorithm)
    values, slopes = drawn.true(truth)
    assert len(wrong(losses, values, largest=torch.finfo(torch.float64).max)) <= but
    bad = wrong(gradient, [slope for row in slopes for slope in row], largest=LARGEST)
    assert len(bad) <= but, bad[:5]


@pytest.mark.slow
@pytest.mark.parametrize("loss", names(HOMES["policy_loss"]))
def test_losses_are_right_where_ratios_overflow_and_underflow(loss):
    formula = OF_THE_BATCH.get(loss)
    proximal = {} if loss in WITHOUT_OLD else {"proximal": "recompute"}
    check(rows(1), LOSSES[formula or loss], but=int(formula is not None), policy_loss=loss, **proximal)


@pytest.mark.slow
@pytest.mark.parametrize("correction", names(HOMES["corrections"]))
def test_corrected_losses_are_right_where_ratios_overflow_and_underflow(correction):
    parameters, weights = CORRECTIONS[correction]
    drawn, scale = rows(2), mpf(1)
    if correction == "self_normalised_tis":
        pairs = zip(drawn.old.tolist(), drawn.rollout.tolist(), strict=True)
        scale = 1 / _mean([w for o, m in pairs for w in weights([mpf(p) for p in o], [mpf(p) for p in m], [], 0)])

    def truth(x: Row, f: Row, o: Row, m: Row, r: Row, a: Any) -> Any:
        return mpmath.fsum(-_exp(p - q) * a * w * scale for p, q, w in zip(x, o, weights(o, m, f, a), strict=True))

    chosen = {
        "proximal": "recompute",
        "policy_loss": "importance_sampling",
        "corrections": [{"name": correction, **parameters}],
    }
    check(drawn, truth, **chosen)


@pytest.mark.slow
@pytest.mark.parametrize("term", TERMS)
def test_kl_terms_are_right_where_ratios_overflow_and_underflow(term):
    place, estimator = term.split(".")
    kl = {place: {"coefficient": 1.0, "estimator": estimator}}
    check(rows(3, advantage=0.0), TERMS[term], policy_loss="reinforce", kl=kl)


@pytest.mark.parametrize(
    ("policy", "reference", "rollout", "value", "slope"),
    [(-110.0, -1.0, -1.0, 1.0, 0.0), (-20.0, -1.0, -19.0, math.exp(18) - 20 / math.e, -19 / math.e)],
)
def test_the_unbiased_kl_is_finite_where_its_ratio_underflows_and_its_k3_overflows(
    policy, reference, rollout, value, slope
):
    given = {"old": rollout, "policy": policy, "reference": reference, "rollout": rollout}
    drawn = Rows(**{name: torch.full((1, 1), x) for name, x in given.items()}, advantages=torch.zeros(1))
    kl = {"loss": {"coefficient": 1.0, "estimator": "unbiased"}}
    losses, gradient = drawn.computed(policy_loss="reinforce", kl=kl)
    assert losses.item() == pytest.approx(value) and gradient.item() == pytest.approx(slope, rel=1e-6, abs=1e-37)
