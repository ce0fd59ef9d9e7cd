"""When to believe that an engine computes the weights it was given: its log-probs of a probe against the learner's, in nats.

Two programs never agree exactly, so the tolerance is measured. Engine and learner start from the same files: how far they differ under
these is the noise of this model, type and hardware. A later version is believed when its error stays near that noise, and when it is
nearer to the version than to the one before it, wherever the two can be told apart.
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
"""Of an engine whose linear layers are quantized, whatever the scheme and the type of the rest."""
_LARGEST_NOISE = {"float32": 1e-3, "bfloat16": 0.2, _8_BITS: 0.5}
"""Nats, mean over the probe. An engine that differs by more under the files it started from is broken, not noisy. Of 8 bits as much as
`mismatch.alarm_nats`: where a ratio is off by e^0.5 on average, a correction has little left to hold on to."""
_SMALLEST_NOISE = {"float32": 5e-5, "bfloat16": 2e-3, _8_BITS: 2e-3}
"""Nats, mean over the probe: what other requests in the batch change, where the measured noise happens to be smaller."""
_LESS_NOISE = dict.fromkeys(
    ("float32", "bfloat16"), "rollout.head_dtype=float32 lowers the noise of a bfloat16 head"
) | {_8_BITS: "rollout.quantization=int8_per_channel rounds less than FP8, and null not at all"}
_TOLERATED = 3.0
"""How many times the noise an engine may be off: rounding changes with the weights."""
_TOLD_APART = 2.0
"""How many times the noise two versions must differ by: below, an engine with the new one could be nearer to the old one by chance."""


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
        """`tolerance` in nats, mean over the probe, replaces the measured one. `files` takes the fingerprint of the starting files.

        The fingerprint is taken when the engine is up: it may have had to download the files.
        """
        self._worker = worker
        self._type = _8_BITS if is_quantized else dtype
        self._tolerance = tolerance
        self._files = files
        self._noise_floor: float | None = None
        self._before: tuple[float, ...] = ()
        """The learner's log-probs of what the engine computed last."""

    @classmethod
    def from_config(
        cls, weights: WeightsConfig, model: ModelConfig, *, worker: str, is_quantized: bool = False
    ) -> Self:
        """For an engine that starts from `model.path`."""
        tolerance, files = weights.canary_tolerance, partial(fingerprint, model)
        return cls(worker=worker, dtype=model.dtype, is_quantized=is_quantized, tolerance=tolerance, files=files)

    @property
    def needs_start(self) -> bool:
        """Whether the engine's starting files were not compared yet."""
        return self._noise_floor is None

    def start(self, canary: Canary, measured: Sequence[float]) -> None:
        """Takes the noise floor: `measured` under the files that the engine started from, before it loaded anything else.

        Raises WeightsError when learner and engine did not start from the same files, or differ by more than noise.
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
        """The proof that `measured` is the manifest's version. Raises WeightsError when it is not.

        It proves what the engine computes up to the tolerance, and no more: a part that stayed old shows once the difference has
        added up. Which version's bytes were loaded is the digest's to say (`verify`); a worker attests both.
        """
        assert self._noise_floor is not None, "an engine is compared on its starting files first"
        canary = manifest.canary
        error, largest = _distances(measured, canary.logprobs)
        noise = max(self._noise_floor, _SMALLEST_NOISE[self._type]) * _unlikelier(canary)
        tolerance = self._tolerance or _TOLERATED * noise
        between, _ = _distances(canary.logprobs, self._before)
        is_distinguishable = between > _TOLD_APART * noise
        said = (
            f"{self._worker} does not compute policy version {manifest.policy_version} (digest {manifest.digest[:16]}…): over "
            f"{len(measured)} canary tokens its log-probs are off by {error:.3g} nats on average, at most {largest:.3g}; "
        )
        if not error <= tolerance:
            raise WeightsError(
                f"{said}{tolerance:.3g} is allowed, its noise under the files it started from was {self._noise_floor:.3g}. {_WHY} "
                "Set weights.canary_tolerance only if the engine computes in a lower precision than the learner"
            )
        old_error, _ = _distances(measured, self._before)
        if is_distinguishable and error >= old_error:
            raise WeightsError(f"{said}and by {old_error:.3g} from the version before, to which it is nearer. {_WHY}")
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
    """How much less likely the probe has become, 1 or more. Rounding is relative: noise grows with the nats of a token."""
    at_start = float(np.abs(canary.starting_logprobs).mean())
    return max(1.0, float(np.abs(canary.logprobs).mean()) / at_start) if at_start else 1.0


def _distances(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Mean and largest absolute difference."""
    errors = np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64))
    return float(errors.mean()), float(errors.max())
