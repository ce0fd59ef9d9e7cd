"""Results of the golden vectors per peer and function: `results.json`, a source of the documentation."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.golden.cases import Outcome, by_reason

RESULTS = Path(__file__).with_name("results.json")


def summarise(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Peer, then function, to numbers of variants that pass, those unsupported and outputs not compared by reason."""
    peers: dict[str, Any] = {}
    for outcome in outcomes:
        functions = peers.setdefault(outcome.name.partition("/")[0], {})
        for variant, function in outcome.functions.items():
            empty = {"passed": 0, "peer_raised": 0, "unsupported": {}, "not_compared": {}}
            row = functions.setdefault(_short(function), empty)
            if variant in outcome.passed:
                row["passed"] += 1
                for why, names in by_reason(outcome.uncompared.get(variant, {})).items():
                    row["not_compared"][why] = sorted({*row["not_compared"].get(why, ()), *names})
            elif variant in outcome.peer_raised:
                row["peer_raised"] += 1
            elif variant in outcome.unsupported:
                reason = outcome.unsupported[variant]
                row["unsupported"][reason] = row["unsupported"].get(reason, 0) + 1
    return {peer: dict(sorted(functions.items())) for peer, functions in sorted(peers.items())}


def write(outcomes: Iterable[Outcome]) -> None:
    RESULTS.write_text(json.dumps(summarise(outcomes), indent=1, ensure_ascii=False) + "\n")


def _short(function: str) -> str:
    """Without the package's path: `GRPOTrainer._compute_loss`, `compute_policy_loss_gspo`."""
    head, _, arguments = function.partition("(")
    parts = [part.rsplit(".", 2) for part in head.split(" -> ")]
    names = [".".join(part[-2:]) if part[-2:][0][:1].isupper() else part[-1] for part in parts]
    return " -> ".join(names) + (f"({arguments}" if arguments else "")
