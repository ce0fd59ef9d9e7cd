"""KL controllers, which LightRFT, OpenRLHF and verl have in common down to the names of their settings."""

from typing import Any

import torch

from cluster.contracts.algorithm_config import AlgorithmConfig
from learner.algorithms.objective import Objective
from tests.golden.cases import Variant


def adaptive_kl(v: Variant) -> dict[str, Any]:
    adaptive = {"target": v.option("target"), "horizon": v.option("horizon")}
    return _coefficients(v, {"adaptive": adaptive}, num_trajectories=v.option("n_steps"))


def fixed_kl(v: Variant) -> dict[str, Any]:
    v.without_effect("n_steps")
    return _coefficients(v, {}, num_trajectories=1)


def _coefficients(v: Variant, settings: dict[str, Any], *, num_trajectories: int) -> dict[str, Any]:
    term = {"coefficient": v.option("init"), **settings}
    objective = Objective.from_config(AlgorithmConfig.model_validate({"kl": {"loss": term}}))
    observed = []
    for measured in v["kl_sequence"].tolist():
        objective.observe({"kl_reference_per_trajectory_mean": measured, "trajectories": num_trajectories})
        observed.append(objective.kl_coefficients["loss"])
    return {"values": torch.tensor(observed, dtype=torch.float64)}
