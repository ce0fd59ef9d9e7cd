"""Golden cases: reading them, running one through our functions, comparing. Their form is described beside the vectors (README.md).

A case passes when every output of every variant that an adapter translates agrees at the case's tolerance, gradients included.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from learner.algorithms.masks import half_precision_kept


class Unsupported(Exception):
    """We do not offer what this variant records; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One call of a peer's function, as the case recorded it."""

    case: str
    name: str
    function: str
    config: Mapping[str, Any]
    inputs: Mapping[str, Any]
    """Tensors, or plain JSON. Those that the case has gradients for are leaves that require grad."""
    wanted: frozenset[str]
    root: Path
    """The folder of all peers, for `_models`."""
    notes: str = ""

    def __getitem__(self, name: str) -> Any:
        return self.inputs[name]

    def __contains__(self, name: str) -> bool:
        return name in self.inputs

    def mask(self, name: str = "mask") -> Tensor:
        return self.inputs[name].bool()

    def option(self, name: str, default: Any = None) -> Any:
        """A setting of the peer; its own default where the case leaves it out."""
        return self.config.get(name, default)


Adapter = Callable[[Variant], Mapping[str, Any]]
"""Translates a peer's function and settings into ours, and returns our outputs under the peer's names. `total` is what gradients are of."""


@dataclass
class Outcome:
    """What running one case gave."""

    name: str
    passed: list[str] = field(default_factory=list)
    differs: dict[str, str] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)
    """Variant to reason."""
    not_offered: set[str] = field(default_factory=set)
    """Recorded outputs, mostly a peer's own log lines, that our adapter returns nothing for."""
    peer_raised: list[str] = field(default_factory=list)
    functions: dict[str, str] = field(default_factory=dict)
    """Variant to the peer's function."""

    @property
    def status(self) -> str:
        if self.differs:
            return "differs"
        return "ok" if self.passed or not self.unsupported else "unsupported"

    def line(self) -> str:
        if self.differs:
            name, error = next(iter(self.differs.items()))
            more = f" (and {len(self.differs) - 1} more)" if len(self.differs) > 1 else ""
            return f"{self.name}: differs: {name}: {error}{more}"
        reasons = "; ".join(f"{', '.join(names)}: {why}" for why, names in _by_reason(self.unsupported).items())
        if self.status == "unsupported":
            return f"{self.name}: unsupported: {reasons}"
        parts = [f"{len(self.passed)} variants"]
        if self.peer_raised:
            parts.append(f"{len(self.peer_raised)} where the peer raised")
        if reasons:
            parts.append(f"unsupported: {reasons}")
        if self.not_offered:
            names = sorted(self.not_offered)
            parts.append(
                f"not compared: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
            )
        return f"{self.name}: ok ({'; '.join(parts)})"


def find_cases(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.rglob("case.json"))


def run_case(folder: Path, *, adapters: Mapping[str, Mapping[str, Adapter]]) -> Outcome:
    case = json.loads((folder / "case.json").read_text())
    data_file = folder / "data.safetensors"
    data = load_file(data_file) if data_file.exists() else {}
    outcome = Outcome(f"{case['peer']}/{case['case']}")
    for name, recorded in case["variants"].items():
        outcome.functions[name] = recorded["function"]
        if recorded.get("expected_error"):
            outcome.peer_raised.append(name)
            continue
        wanted = {
            output: _recorded(data, name, output, item) for output, item in (recorded.get("outputs") or {}).items()
        }
        tolerance = recorded.get("tolerance") or case["tolerance"]
        variant = Variant(
            case=case["case"],
            name=name,
            function=recorded["function"],
            config=recorded["config"],
            inputs=_inputs(case, data, wanted),
            wanted=frozenset(wanted),
            root=folder.parent.parent,
            notes=" ".join(case.get("notes") or []),
        )
        _run_variant(variant, wanted, tolerance, adapters.get(case["peer"]), outcome)
    return outcome


def _run_variant(
    variant: Variant,
    wanted: Mapping[str, Any],
    tolerance: Mapping[str, Any],
    adapters: Mapping[str, Adapter] | None,
    outcome: Outcome,
) -> None:
    if adapters is None:
        outcome.unsupported[variant.name] = "no adapter for this peer"
        return
    try:
        # The peers round to bfloat16 at every step when they are given it; we compute it in float32 unless asked to do as they do.
        with half_precision_kept():
            got = dict(_adapter(adapters, variant.function)(variant))
            got |= _gradients(variant, got)
    except Unsupported as reason:
        outcome.unsupported[variant.name] = str(reason)
        return
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        outcome.differs[variant.name] = f"raised {type(error).__name__}: {error}"
        return
    compared = [name for name in wanted if name in got]
    outcome.not_offered |= wanted.keys() - got.keys()
    if not compared:
        outcome.unsupported[variant.name] = "none of the recorded outputs is offered"
        return
    problems = {name: problem for name in compared if (problem := difference(got[name], wanted[name], tolerance))}
    if problems:
        outcome.differs[variant.name] = ", ".join(f"{name} {problem}" for name, problem in problems.items())
    else:
        outcome.passed.append(variant.name)


def difference(got: Any, want: Any, tolerance: Mapping[str, Any]) -> str:
    """Empty when they agree; else what differs most."""
    if not isinstance(want, Tensor):
        return "" if _plain(got) == want else f"{_plain(got)!r} instead of {want!r}"
    got = torch.as_tensor(got).detach()
    if got.shape != want.shape:
        return f"has shape {list(got.shape)} instead of {list(want.shape)}"
    got, want = got.double(), want.double()
    close = torch.isclose(got, want, rtol=tolerance["rtol"], atol=tolerance["atol"], equal_nan=True)
    if bool(close.all()):
        return ""
    if "ill_conditioned" in tolerance and bool(((got - want).abs() <= 2 + want.abs()).all()):
        # Rounding noise of a zero-variance group over a tiny epsilon: its size depends on the order of a sum. Magnitude only.
        return ""
    wrong = (got - want).abs().nan_to_num(nan=torch.inf)
    worst = int(torch.where(close, 0.0, wrong).argmax())
    return f"max error {wrong.flatten()[worst]:.3g} ({got.flatten()[worst]:.6g} instead of {want.flatten()[worst]:.6g})"


def _adapter(adapters: Mapping[str, Adapter], function: str) -> Adapter:
    """The adapter whose key begins or ends the peer's function name; longer keys first."""
    for key in sorted(adapters, key=len, reverse=True):
        if function.startswith(key) or function.endswith(key):
            return adapters[key]
    raise Unsupported(f"no counterpart of {function}")


def _inputs(case: Mapping[str, Any], data: Mapping[str, Tensor], wanted: Mapping[str, Any]) -> dict[str, Any]:
    leaves = {name.split(".", 1)[1] for name in wanted if name.startswith(("grad.", "grad_total."))}
    inputs: dict[str, Any] = {name: item["json"] for name, item in case["inputs"].items() if "json" in item}
    inputs |= {key.removeprefix("in."): tensor.clone() for key, tensor in data.items() if key.startswith("in.")}
    return {name: value.requires_grad_() if name in leaves else value for name, value in inputs.items()}


def _gradients(variant: Variant, got: Mapping[str, Any]) -> dict[str, Tensor]:
    names = [name for name in variant.wanted if name.startswith(("grad.", "grad_total.")) and name not in got]
    total = got.get("total", got.get("loss"))
    if not names or not isinstance(total, Tensor):
        return {}
    names = [name for name in names if name.split(".", 1)[1] in variant.inputs]
    leaves = [variant.inputs[name.split(".", 1)[1]] for name in names]
    if not total.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in zip(names, leaves, strict=True)}
    found = torch.autograd.grad(total.sum(), leaves, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if g is None else g for name, leaf, g in zip(names, leaves, found, strict=True)
    }


def _recorded(data: Mapping[str, Tensor], variant: str, output: str, item: Mapping[str, Any]) -> Any:
    stored = data.get(f"out.{variant}.{output}")
    if stored is not None:
        return stored
    if "json" in item:
        return item["json"]
    value = item["value"] if isinstance(item, Mapping) else item
    return torch.tensor(float(value), dtype=torch.float64) if not isinstance(value, list) else value


def _plain(got: Any) -> Any:
    if isinstance(got, Tensor):
        return got.tolist()
    return json.loads(json.dumps(got)) if isinstance(got, (tuple, list, dict)) else got


def _by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for name, why in reasons.items():
        grouped.setdefault(why, []).append(name)
    return grouped
