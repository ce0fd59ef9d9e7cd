"""Golden cases: reading them, running one through our functions, comparing. Their form is described beside the vectors (README.md).

A variant passes when every recorded output agrees at the tolerance, gradients included, or its adapter says why one is not compared. A
setting that the adapter did not read makes it `unsupported`: it might have changed the result.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.golden.comparison import difference, is_rounded, sensitivity
from tests.golden.settings import Settings, settings_of

VECTORS = Path(__file__).with_name("vectors")


class Unsupported(Exception):
    """We do not offer this variant; the message says why."""


@dataclass(frozen=True, slots=True)
class Uncompared:
    """In the place of one output: nothing of ours corresponds to it, and why."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One call of a peer's function, as the case recorded it."""

    name: str
    function: str
    config: Settings
    inputs: Mapping[str, Any]
    """Tensors, or plain JSON. Those that the case has gradients for are leaves that require grad."""
    wanted: frozenset[str]
    root: Path
    """The folder of all peers, for `_models`."""

    def __getitem__(self, name: str) -> Any:
        return self.inputs[name]

    def __contains__(self, name: str) -> bool:
        return name in self.inputs

    def mask(self, name: str = "mask") -> Tensor:
        return self.inputs[name].bool()

    def option(self, name: str, default: Any = None) -> Any:
        """A setting of the peer; its own default where the case leaves it out."""
        return self.config.get(name, default)

    def only(self, name: str, *allowed: Any) -> Any:
        """A setting of which we offer some values: the first where the case leaves it out. Raises Unsupported for any other."""
        value = self.config.get(name, allowed[0])
        if value not in allowed:
            raise Unsupported(f"parameter {name}={value!r}")
        return value

    def without_effect(self, *names: str, section: str | None = None) -> None:
        """Settings (of a section of them) that the peer takes and, as it is called here, does not use."""
        settings = self.config if section is None else self.option(section, {})
        for name in names:
            settings.get(name)


Adapter = Callable[[Variant], Mapping[str, Any]]
"""Translates a peer's function and settings into ours, and returns our outputs under the peer's names. Gradients are taken of `total`."""


@dataclass
class Outcome:
    """The result of one case."""

    name: str
    passed: list[str] = field(default_factory=list)
    differs: dict[str, str] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)
    """Variant to reason."""
    uncompared: dict[str, dict[str, str]] = field(default_factory=dict)
    """Of a variant that passed: its outputs that nothing of ours corresponds to, and why."""
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
        reasons = "; ".join(f"{', '.join(names)}: {why}" for why, names in by_reason(self.unsupported).items())
        if self.status == "unsupported":
            return f"{self.name}: unsupported: {reasons}"
        parts = [f"{len(self.passed)} variants"]
        if self.peer_raised:
            parts.append(f"{len(self.peer_raised)} where the peer raised")
        if reasons:
            parts.append(f"unsupported: {reasons}")
        outputs = {name: why for of_variant in self.uncompared.values() for name, why in of_variant.items()}
        for why, names in by_reason(outputs).items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"not compared: {', '.join(names[:3])}{more}: {why}")
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
            name=name,
            function=recorded["function"],
            config=settings_of(recorded["function"], recorded["config"] or {}),
            inputs=_inputs(case, data, wanted),
            wanted=frozenset(wanted),
            root=folder.parent.parent,
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
        adapter = _adapter(adapters, variant.function)
        got = _outputs(adapter, variant)
    except Unsupported as reason:
        outcome.unsupported[variant.name] = str(reason)
        return
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        outcome.differs[variant.name] = f"raised {type(error).__name__}: {error}"
        return
    if unread := variant.config.unread():
        outcome.unsupported[variant.name] = ", ".join(f"parameter {name}" for name in unread)
        return
    uncompared = {name: got[name].reason for name in wanted if isinstance(got.get(name), Uncompared)}
    missing = wanted.keys() - got.keys()
    if missing or uncompared.keys() == wanted.keys():
        names = sorted(missing or uncompared)
        outcome.unsupported[variant.name] = f"no counterpart of its outputs {', '.join(names)}"
        return
    compared = {name: want for name, want in wanted.items() if name not in uncompared}
    problems = _problems(got, compared, tolerance)
    if problems and ("ill_conditioned" in tolerance or is_rounded(variant.inputs)):
        noise = sensitivity(
            {name: got[name] for name in compared}, lambda inputs: _again(adapter, variant, inputs), variant.inputs
        )
        problems = _problems(got, compared, tolerance, noise=noise)
    if problems:
        outcome.differs[variant.name] = ", ".join(f"{name} {problem}" for name, problem in problems.items())
    else:
        outcome.passed.append(variant.name)
        if uncompared:
            outcome.uncompared[variant.name] = uncompared


def _problems(
    got: Mapping[str, Any],
    wanted: Mapping[str, Any],
    tolerance: Mapping[str, Any],
    *,
    noise: Mapping[str, Tensor] | None = None,
) -> dict[str, str]:
    """Outputs that do not agree, each with its largest difference."""
    noise = noise or {}
    found = {name: difference(got[name], want, tolerance, noise=noise.get(name)) for name, want in wanted.items()}
    return {name: problem for name, problem in found.items() if problem}


def _outputs(adapter: Adapter, variant: Variant) -> dict[str, Any]:
    got = dict(adapter(variant))
    return got | _gradients(variant, got)


def _again(adapter: Adapter, variant: Variant, inputs: Mapping[str, Any]) -> dict[str, Any]:
    return _outputs(adapter, replace(variant, inputs=inputs))


def _adapter(adapters: Mapping[str, Adapter], function: str) -> Adapter:
    """The adapter for this function: by its whole name, or by the path's end; a following bracket or word is ignored."""
    head = function.partition("(")[0].partition(" ")[0]
    found = [key for key in adapters if key == function or head == key or head.endswith("." + key)]
    # `MCAdvantage.inv` is a method of what `MCAdvantage` adapts.
    found = found or [key for key in adapters if head.startswith(key + ".")]
    if not found:
        raise Unsupported(f"no counterpart of {function}")
    return adapters[max(found, key=len)]


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


def by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for name, why in reasons.items():
        grouped.setdefault(why, []).append(name)
    return grouped
