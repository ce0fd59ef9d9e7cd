"""Decides whether an engine computes with the weights it was given, by comparing its log-probs of a probe with the learner's, in nats.

Two programs never agree exactly, so the tolerance is measured. Engine and learner start from the same files, and their difference under
these is the noise of this model, type and hardware. A later version passes if its error stays near that noise and, where the two versions
can be told apart, if the log-probs are nearer to the new version than to the one before.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

import numpy as np

from cluster.contracts.config import ModelConfig, WeightsConfig
from cluster.contracts.errors import WeightsError
from cluster.contracts.types import Proof
from cluster.weights.manifest import Canary, WeightManifest
from cluster.weights.model_files import fingerprint

_8_BITS = "8 bits"
"""An engine with quantized linear layers, whatever the scheme and the type of its other layers."""
_LARGEST_NOISE = {"float32": 1e-3, "bfloat16": 0.2, _8_BITS: 0.5}
"""Nats, mean over the probe. An engine that differs by more under its starting files is broken, not noisy. The limit for 8 bits equals
`mismatch.alarm_nats`: ratios that are off by e^0.5 on average leave little for a correction to work with."""
_SMALLEST_NOISE = {"float32": 5e-5, "bfloat16": 2e-3, _8_BITS: 2e-3}
"""Nats, mean over the probe: the effect of other requests in the batch, used when the measured noise happens to be smaller."""
_LESS_NOISE = dict.fromkeys(
    ("float32", "bfloat16"), "rollout.head_dtype=float32 lowers the noise of a bfloat16 head"
) | {_8_BITS: "rollout.quantization=int8_per_channel rounds less than FP8, and null not at all"}
_TOLERATED = 3.0
"""Allowed error as a multiple of the noise: rounding changes with the weights."""
_TOLD_APART = 2.0
"""Difference of two versions, as a multiple of the noise, from which they can be told apart. Below it an engine with the new version could
be nearer to the old one by chance."""


class Attestor:
    """Judges one engine, version after version."""

    def __init__(
        self,
        *,
        worker: str,
        dtype: str,
        is_quantized: bool = False,
        tolerance: float | None = None,
        files: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`tolerance` in nats, mean over the probe, replaces the measured one. `files` computes the fingerprint of the starting files. It
        is called after the engine has started, since the engine may have to download them.
        """
        self._worker = worker
        self._type = _8_BITS if is_quantized else dtype
        self._tolerance = tolerance
        self._files = files
        self._noise_floor: float | None = None
        self._before: tuple[float, ...] = ()
        """The learner's log-probs under the version that the engine proved last, at first under its starting files."""

    @classmethod
    def from_config(
        cls, weights: WeightsConfig, model: ModelConfig, *, worker: str, is_quantized: bool = False
    ) -> Self:
        """For an engine that starts from `model.path`."""
        tolerance, files = weights.canary_tolerance, partial(fingerprint, model)
        return cls(worker=worker, dtype=model.dtype, is_quantized=is_quantized, tolerance=tolerance, files=files)

    @property
    def needs_start(self) -> bool:
        """Whether `start` has not succeeded yet."""
        return self._noise_floor is None

    def start(self, canary: Canary, measured: Sequence[float]) -> None:
        """Sets the noise floor. `measured`: the engine's log-probs under its starting files, before it loads anything else.

        Raises WeightsError if learner and engine did not start from the same files, or differ by more than noise.
        """
        files = self._files()
        if files and canary.starting_files and files != canary.starting_files:
            raise WeightsError(
                f"{self._worker} loaded other files than the learner (fingerprint {files[:16]}…, the learner's is "
                f"{canary.starting_files[:16]}…): model.path must hold the same model on every node; pin model.revision for one of the hub"
            )
        floor, largest = _distances(measured, canary.starting_logprobs)
        limit = self._tolerance or _LARGEST_NOISE[self._type]
        if not floor <= limit:  # so that a NaN is refused
            raise WeightsError(
                f"{self._worker} does not compute what the learner computes with the same files, before any update: over "
                f"{len(measured)} canary tokens its log-probs are off by {floor:.3g} nats on average, at most {largest:.3g}; "
                f"{limit:.3g} is the most that passes for noise in {self._type}. {_LESS_NOISE[self._type]}; if the engine is right "
                "and only this noisy, set weights.canary_tolerance"
            )
        self._noise_floor, self._before = floor, canary.starting_logprobs

    def compare(self, manifest: WeightManifest, measured: Sequence[float]) -> Proof:
        """The proof that `measured` comes from the manifest's version. Raises WeightsError if it does not.

        The proof holds up to the tolerance: a part that kept old weights shows only once the difference has added up. That the version's
        bytes were loaded is proven by the digest (`verify`); a worker attests both.
        """
        assert self._noise_floor is not None, "an engine is compared on its starting files first"
        canary = manifest.canary
        error, largest = _distances(measured, canary.logprobs)
        noise = max(self._noise_floor, _SMALLEST_NOISE[self._type]) * _unlikelier(canary)
        tolerance = self._tolerance or _TOLERATED * noise
        between, _ = _distances(canary.logprobs, self._before)
        is_distinguishable = between > _TOLD_APART * noise
        failure = (
            f"{self._worker} does not compute policy version {manifest.policy_version} (digest {manifest.digest[:16]}…): over "
            f"{len(measured)} canary tokens its log-probs are off by {error:.3g} nats on average, at most {largest:.3g}; "
        )
        if not error <= tolerance:
            raise WeightsError(
                f"{failure}{tolerance:.3g} is allowed, its noise under the files it started from was {self._noise_floor:.3g}. {_WHY} "
                "Set weights.canary_tolerance only if the engine computes in a lower precision than the learner"
            )
        old_error, _ = _distances(measured, self._before)
        if is_distinguishable and error >= old_error:
            raise WeightsError(
                f"{failure}and by {old_error:.3g} from the version before, to which it is nearer. {_WHY}"
            )
        self._before = canary.logprobs
        return Proof(
            canary_mean_error=error,
            canary_max_error=largest,
            tolerance=tolerance,
            noise_floor=self._noise_floor,
            distinguishable=is_distinguishable,
        )


_WHY = (
    "The bytes arrived whole, so the engine still serves other weights in part, most likely an old vocabulary head (tied embeddings "
    "need weights.repair_tied_head=true) or a layer that the learner did not publish."
)


def _unlikelier(canary: Canary) -> float:
    """Mean nats of the probe's tokens relative to the start, at least 1. Rounding is relative, so noise grows with a token's nats."""
    at_start = float(np.abs(canary.starting_logprobs).mean())
    return max(1.0, float(np.abs(canary.logprobs).mean()) / at_start) if at_start else 1.0


def _distances(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Mean and maximum of the absolute differences."""
    errors = np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64))
    return float(errors.mean()), float(errors.max())
