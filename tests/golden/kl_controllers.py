"""KL controllers, which LightRFT, OpenRLHF and verl have in common down to the names of their settings."""

from typing import Any

import torch

from cluster.contracts.algorithm_config import AdaptiveKlConfig
from learner.algorithms.objective.controllers import KlController
from tests.golden.cases import Variant


def adaptive_kl(v: Variant) -> dict[str, Any]:
    adaptive = AdaptiveKlConfig(target=v.option("target"), horizon=v.option("horizon"))
    controller = KlController(coefficient=v.option("init"), adaptive=adaptive)
    observed = []
    for measured in v["kl_sequence"].tolist():
        controller = controller.observe(measured, num_trajectories=v.option("n_steps"))
        observed.append(controller.coefficient)
    return {"values": torch.tensor(observed, dtype=torch.float64)}


def fixed_kl(v: Variant) -> dict[str, Any]:
    v.without_effect("n_steps")
    coefficient = KlController(coefficient=v.option("init")).observe(1.0, num_trajectories=1).coefficient
    return {"values": torch.full_like(v["kl_sequence"], coefficient)}
