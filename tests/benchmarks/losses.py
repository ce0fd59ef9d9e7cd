"""Time and peak memory of each loss, forward and backward, at 64 x 1,024 tokens, against the same function of verl in the same run.

verl is installed for the benchmark only, into build/peers; it computes the losses on CPUs as well. Where it cannot be installed the
baseline is the formula written down plainly, ratio and minimum, as the papers have it: it counts nothing clipped, and lets an inf at
padding through.
"""

import importlib
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from learner.algorithms import kl
from learner.algorithms.batch_rules.aggregation import aggregate, sequence_mean, token_mean
from learner.algorithms.losses import policy, sequence
from learner.algorithms.losses.surrogates import TokenLosses
from learner.algorithms.losses.values import value_clip
from tests.benchmarks import peers

ROWS, WIDTH, REPEATS = 64, 1024, 21
Run = Callable[[], Tensor]


def rows() -> list[dict[str, Any]]:
    """A row for time and one for memory, per loss; the aim is no slower and no more memory."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = _inputs(device)
    peer = _verl()
    found: list[dict[str, Any]] = []
    for name, ours in _ours(inputs).items():
        theirs = _theirs(name, inputs, peer)
        # What computes something else is no baseline.
        torch.testing.assert_close(ours(), theirs(), rtol=1e-3, atol=1e-4)
        baseline = "plain formula" if peer is None else "verl"
        (our_ms, their_ms), our_bytes, their_bytes = _times(ours, theirs, device), _peak(ours), _peak(theirs)
        found.append(_row(f"loss {name}: time", our_ms, "ms", baseline, their_ms, slack=1.1))
        found.append(
            _row(f"loss {name}: peak memory", our_bytes / 2**20, "MiB", baseline, their_bytes / 2**20, slack=1.0)
        )
    return found


def _row(name: str, value: float, unit: str, baseline: str, baseline_value: float, *, slack: float) -> dict[str, Any]:
    """Times wobble between runs, so `no slower` has a tenth of slack; memory does not. The plain formula is no aim."""
    return {
        "name": name,
        "value": round(value, 3),
        "unit": unit,
        "baseline": baseline,
        "baseline_value": round(baseline_value, 3),
        "ratio": round(value / baseline_value, 3),
        "aim": None if baseline == "plain formula" else f"<= {slack}",
    }


def _inputs(device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def noise() -> Tensor:
        return torch.randn(ROWS, WIDTH, generator=generator)

    old = -noise().abs()
    lengths = torch.randint(WIDTH // 4, WIDTH + 1, (ROWS, 1), generator=generator)
    made = {
        "policy": old + 0.1 * noise(),
        "old": old,
        "advantages": noise()[:, :1].expand(ROWS, WIDTH).contiguous(),
        "mask": torch.arange(WIDTH) < lengths,
        "values": noise(),
        "returns": noise(),
    }
    made = {name: tensor.to(device) for name, tensor in made.items()}
    return made | {"float_mask": made["mask"].float()}


def _ours(x: dict[str, Tensor]) -> dict[str, Run]:
    mask = x["mask"]
    given = {"proximal_logprobs_BT": x["old"], "advantages_BT": x["advantages"], "loss_mask_BT": mask}

    def weighted(losses_BT: Tensor, rule: Callable[[Tensor], Tensor]) -> Tensor:
        # In the timed call: the peer sums its mask there, too.
        return aggregate(losses_BT, weights_BT=rule(mask).float())

    def aggregated(
        function: Callable[..., TokenLosses | Tensor], rule: Callable[[Tensor], Tensor], **params: float
    ) -> Run:
        def run() -> Tensor:
            result = function(x["policy"].requires_grad_(), **given, **params)
            return weighted(result if isinstance(result, Tensor) else result.losses_BT, rule)

        return run

    def reference_kl() -> Tensor:
        estimate = kl.k3(x["policy"].requires_grad_(), other_logprobs_BT=x["old"], loss_mask_BT=mask)
        return weighted(estimate, token_mean)

    def value() -> Tensor:
        result = value_clip(
            x["policy"].requires_grad_(), old_values_BT=x["values"], returns_BT=x["returns"], loss_mask_BT=mask
        )
        return weighted(result.losses_BT, token_mean)

    return {
        "ppo_clip": aggregated(policy.ppo_clip, token_mean, dual_clip=3.0, log_ratio_clamp=20.0),
        "gspo_token": aggregated(sequence.gspo_token, sequence_mean),
        "cispo": aggregated(policy.cispo, token_mean, log_ratio_clamp=20.0),
        "sapo": aggregated(policy.sapo, sequence_mean, log_ratio_clamp=20.0),
        "gmpo": aggregated(sequence.gmpo, sequence_mean),
        "k3": reference_kl,
        "value_clip": value,
    }


_IN_VERL = {
    "ppo_clip": ("vanilla", "token-mean", (0.2, 0.2)),
    "gspo_token": ("gspo", "seq-mean-token-mean", (3e-4, 4e-4)),
    "cispo": ("cispo", "token-mean", (1.0, 4.0)),
    "sapo": ("sapo", "seq-mean-token-mean", (0.2, 0.2)),
    "gmpo": ("geo_mean", "seq-mean-token-mean", (0.4, 0.4)),
}
"""Policy losses: name, aggregation, and the bounds that are ours by default."""


def _theirs(name: str, x: dict[str, Tensor], peer: Any) -> Run:
    if peer is None:
        return _plain(name, x)
    mask, policy = x["float_mask"], x["policy"].requires_grad_()
    if name == "k3":
        return lambda: peer.agg_loss(peer.kl_penalty(policy, x["old"], "low_var_kl"), mask, "token-mean")
    if name == "value_clip":
        return lambda: peer.compute_value_loss(policy, x["returns"], x["values"], mask, 0.2)[0]
    function, mode, bounds = _IN_VERL[name]
    compute, config = getattr(peer, f"compute_policy_loss_{function}"), _verl_config(*bounds)
    return lambda: compute(x["old"], policy, x["advantages"], mask, loss_agg_mode=mode, config=config)[0]


def _verl_config(low: float, high: float) -> Any:
    config = importlib.import_module("verl.workers.config").ActorConfig
    bounds = {"clip_ratio_low": low, "clip_ratio_high": high, "tau_pos": 1.0, "tau_neg": 1.05}
    return config(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **bounds)


def _plain(name: str, x: dict[str, Tensor]) -> Run:
    """The formulas as the papers write them: a ratio, a minimum, a mask that multiplies."""
    mask = x["float_mask"]

    def run() -> Tensor:
        policy = x["policy"].requires_grad_()
        per_token = _plain_losses(name, policy, x)
        if name in ("gspo_token", "sapo", "gmpo"):
            return ((per_token * mask).sum(1) / mask.sum(1)).mean()
        return (per_token * mask).sum() / mask.sum()

    return run


def _plain_losses(name: str, policy: Tensor, x: dict[str, Tensor]) -> Tensor:
    mask, A = x["float_mask"], x["advantages"]
    gap = policy - x["old"]
    if name == "k3":
        return (-gap).exp() + gap - 1
    if name == "value_clip":
        held = x["values"] + (policy - x["values"]).clamp(-0.2, 0.2)
        return 0.5 * torch.maximum((policy - x["returns"]).square(), (held - x["returns"]).square())
    if name == "cispo":
        return -gap.exp().clamp(max=5.0).detach() * A * policy
    if name == "sapo":
        tau = torch.where(A > 0, 1.0, 1.05)
        return -4 / tau * torch.sigmoid(tau * (gap.exp() - 1)) * A
    if name == "gmpo":
        bounded = torch.where(A > 0, gap.clamp(max=0.4), gap.clamp(min=-0.4))
        return (-A[:, :1] * ((bounded * mask).sum(1) / mask.sum(1)).exp()[:, None]).expand_as(gap)
    if name == "gspo_token":
        mean = ((gap * mask).sum(1) / mask.sum(1))[:, None].detach()
        ratio = (mean + policy - policy.detach()).exp()
        return -torch.minimum(ratio * A, ratio.clamp(1 - 3e-4, 1 + 4e-4) * A)
    ratio = gap.clamp(-20, 20).exp()
    surrogate = torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
    return -torch.where(A < 0, torch.maximum(surrogate, 3.0 * A), surrogate)


def _verl() -> Any:
    if not peers.install("verl"):
        return None
    # Behind everything else: the peer's packages are those that are missing here.
    sys.path.append(str(peers.FOLDER))
    return importlib.import_module("verl.trainer.ppo.core_algos")


def _step(run: Run) -> None:
    loss = run()
    loss.backward()


def _times(ours: Run, theirs: Run, device: str) -> tuple[float, float]:
    """Medians, the two taking turns so that what else the machine does falls on both."""
    taken: dict[Run, list[float]] = {ours: [], theirs: []}
    for _ in range(REPEATS + 3):
        for run, times in taken.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            _step(run)
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - start))
    return statistics.median(taken[ours][3:]), statistics.median(taken[theirs][3:])


class _LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside held at one time; the same count on every device."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known_before = {item.untyped_storage().data_ptr() for item in tree_iter(args) if isinstance(item, Tensor)}
        for item in tree_iter(result):
            if isinstance(item, Tensor):
                self._count(item, known_before)
        return result

    def _count(self, tensor: Tensor, inputs: set[int]) -> None:
        storage = tensor.untyped_storage()
        pointer, size = storage.data_ptr(), storage.nbytes()
        if pointer in self._known or pointer in inputs or not size:
            return
        self._known.add(pointer)
        self._now += size
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._forget, pointer, size)

    def _forget(self, pointer: int, size: int) -> None:
        self._known.discard(pointer)
        self._now -= size


def _peak(run: Run) -> int:
    _step(run)
    with _LiveBytes() as live:
        _step(run)
    return live.peak
