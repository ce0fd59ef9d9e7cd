"""Compares our outputs with a peer's, and finds the entries that no two programs would agree on."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_NUM_ROUNDINGS = 8
_ULPS = 2
_NOISE_FACTOR = 4.0


def difference(got: Any, want: Any, tolerance: Mapping[str, Any], *, noise: Tensor | None = None) -> str:
    """Empty when they agree; else the largest difference.

    `noise`, of the output's shape, widens the absolute tolerance of single entries: how far rounding of the inputs moves them.
    """
    if not isinstance(want, Tensor):
        return "" if _same(_plain(got), want, tolerance) else f"{_plain(got)!r} instead of {want!r}"
    got = torch.as_tensor(got).detach()
    if got.shape != want.shape:
        return f"has shape {list(got.shape)} instead of {list(want.shape)}"
    got, want = got.double(), want.double()
    close = torch.isclose(got, want, rtol=tolerance["rtol"], atol=tolerance["atol"], equal_nan=True)
    if noise is not None:
        close |= (got - want).abs() <= _NOISE_FACTOR * noise
    if bool(close.all()):
        return ""
    wrong = (got - want).abs().nan_to_num(nan=torch.inf)
    worst = int(torch.where(close, 0.0, wrong).argmax())
    return f"max error {wrong.flatten()[worst]:.3g} ({got.flatten()[worst]:.6g} instead of {want.flatten()[worst]:.6g})"


def sensitivity(
    got: Mapping[str, Any], compute: Callable[[Mapping[str, Any]], Mapping[str, Any]], inputs: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Per output and entry, how far it moves when the floating-point inputs are off by two units in their last place.

    Where a group without variance is divided by a tiny epsilon, it is as large as the entry itself: the recorded value shows the order
    in which the peer summed. Where the peer rounded to bfloat16 at every step, it is what those roundings come to. Everywhere else it
    is far below the tolerance.
    """
    generator = torch.Generator().manual_seed(0)
    moved = {
        name: torch.zeros_like(value, dtype=torch.float64) for name, value in got.items() if isinstance(value, Tensor)
    }
    for _ in range(_NUM_ROUNDINGS):
        again = compute({name: _rounded(value, generator) for name, value in inputs.items()})
        for name, most in moved.items():
            gap = (again[name].detach().double() - got[name].detach().double()).abs()
            moved[name] = torch.maximum(most, gap.nan_to_num(nan=0.0, posinf=0.0))
    if is_rounded(inputs):
        # A sum that ends near 0 was rounded where it was largest.
        largest = max(float(got[name].detach().abs().max()) for name in moved)
        last_places = _ULPS * torch.finfo(torch.bfloat16).eps * largest
        moved = {name: most.clamp(min=last_places / _NOISE_FACTOR) for name, most in moved.items()}
    return moved


def is_rounded(inputs: Mapping[str, Any]) -> bool:
    """Given bfloat16, the peers round at every step, and we at none."""
    return any(isinstance(value, Tensor) and value.dtype == torch.bfloat16 for value in inputs.values())


def _rounded(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    ulps = torch.randint(-_ULPS, _ULPS + 1, value.shape, generator=generator)
    other = value.detach() * (1 + ulps.to(value.dtype) * torch.finfo(value.dtype).eps)
    return other.to(value.dtype).requires_grad_(value.requires_grad)


def _same(got: Any, want: Any, tolerance: Mapping[str, Any]) -> bool:
    """JSON against JSON, numbers by the tolerance."""
    if isinstance(want, dict) and isinstance(got, dict):
        return got.keys() == want.keys() and all(_same(got[key], want[key], tolerance) for key in want)
    if isinstance(want, list) and isinstance(got, list):
        return len(got) == len(want) and all(_same(a, b, tolerance) for a, b in zip(got, want, strict=True))
    if isinstance(want, float) and isinstance(got, int | float):
        both_nan = math.isnan(want) and math.isnan(got)
        return both_nan or math.isclose(got, want, rel_tol=tolerance["rtol"], abs_tol=tolerance["atol"])
    return got == want


def _plain(got: Any) -> Any:
    if isinstance(got, Tensor):
        return got.tolist()
    return json.loads(json.dumps(got)) if isinstance(got, tuple | list | dict) else got
