"""KL controllers, which LightRFT, OpenRLHF and verl have in common down to the names of their settings."""

from typing import Any

import torch

from learner.algorithms.objective.controllers import AdaptiveKl, FixedKl
from tests.golden.cases import Variant


def adaptive_kl(v: Variant) -> dict[str, Any]:
    controller = AdaptiveKl(coefficient=v.option("init"), target=v.option("target"), horizon=v.option("horizon"))
    observed = []
    for measured in v["kl_sequence"].tolist():
        controller = controller.observe(measured, num_trajectories=v.option("n_steps"))
        observed.append(controller.coefficient)
    return {"values": torch.tensor(observed, dtype=torch.float64)}


def fixed_kl(v: Variant) -> dict[str, Any]:
    v.without_effect("n_steps")
    coefficient = FixedKl(coefficient=v.option("init")).observe(1.0, num_trajectories=1).coefficient
    return {"values": torch.full_like(v["kl_sequence"], coefficient)}
