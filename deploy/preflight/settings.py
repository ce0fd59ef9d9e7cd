"""Settings against each other, against the run directory, and against the environment."""

import os
from typing import TYPE_CHECKING

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.importing import importing
from cluster.contracts.learner_config import LoraConfig
from cluster.contracts.plugins import TRANSPORTS, resolve
from cluster.contracts.upkeep_config import ElasticConfig
from cluster.record.run_directory import RUN_YAML, RunDirectory
from deploy.config.loading import resolved_yaml
from deploy.config.spelling import spelled_out
from deploy.config.written import settings_in

if TYPE_CHECKING:
    from learner.algorithms.objective import Objective

_MAX_ADAPTER_RANK = 512


def check_run_dir(config: RunConfig) -> None:
    directory = RunDirectory(config.run_dir)
    directory.reach()
    if directory.exists(RUN_YAML):
        settings_in(directory)  # says which file is damaged
    directory.check(resolved_yaml(config), spelled_out=spelled_out)


def check_effects(config: RunConfig) -> None:
    """Raises ConfigError for what would not act beside the other settings. A run that began with it can still be looked at."""
    fewest, most = config.elastic.min_workers, config.elastic.max_workers
    if config.deterministic and most is not None:
        raise ConfigError(
            f"elastic.max_workers={most} with deterministic=true: which worker samples what is fixed, so none joins or leaves; leave it "
            "out, and set rollout.num_workers"
        )
    if fewest != ElasticConfig.model_fields["min_workers"].default and most is None:
        raise ConfigError(f"elastic.min_workers={fewest} says nothing without elastic.max_workers; leave it out")


def check_compute_type(config: RunConfig) -> None:
    """Of a run on hardware that is not at hand."""
    if config.model.dtype == "auto":
        raise ConfigError(
            "model.dtype='auto' asks the machine, which is not here; write bfloat16 or float32, as it would be there"
        )


def check_tensor_parallel(config: RunConfig) -> None:
    needed, gpus = config.rollout.tensor_parallel_size, config.rollout.gpus_per_worker
    if needed > 1 and 0 < gpus < needed:
        raise ConfigError(
            f"rollout.tensor_parallel_size={needed} needs as many GPUs, rollout.gpus_per_worker={gpus:g}; set "
            f"rollout.gpus_per_worker={needed}, or 0 for an engine on CPUs"
        )


def check_transport(config: RunConfig) -> None:
    resolve(config.weights.transport, home=TRANSPORTS, field="weights.transport")  # torch


def check_weights(config: RunConfig) -> None:
    if (adapter := config.published_adapter) is not None:
        _check_adapter(adapter, config)
    if config.weights.deltas:
        _check_deltas(config)
    if config.weights.transport.name != "collective":
        return
    learner, rollout = config.learner, config.rollout
    if config.weights_backend == "nccl" and not config.weights_find_whole_gpus:
        raise ConfigError(
            f"weights.backend=nccl needs whole GPUs on both sides, but learner.gpus_per_rank={learner.gpus_per_rank:g} and "
            f"rollout.gpus_per_worker={rollout.gpus_per_worker:g}; use weights.backend=gloo"
        )
    if config.published_adapter is not None:
        raise ConfigError(
            "weights.transport=collective carries whole models, and learner.lora.publish=adapter publishes adapters, which are small; "
            "use weights.transport=object_store, or learner.lora.publish=merged"
        )


def _check_adapter(adapter: LoraConfig, config: RunConfig) -> None:
    if adapter.rank > _MAX_ADAPTER_RANK:
        raise ConfigError(
            f"learner.lora.rank={adapter.rank} with learner.lora.publish='adapter': vLLM takes adapters of rank {_MAX_ADAPTER_RANK} or "
            "less; lower it, or use learner.lora.publish=merged"
        )
    if config.rollout.gpus_per_worker and config.model.dtype == "float32":
        raise ConfigError(
            "learner.lora.publish='adapter' with model.dtype='float32' and engines on GPUs: vLLM's kernels for adapters multiply bfloat16; "
            "use model.dtype=bfloat16, or learner.lora.publish=merged"
        )


def _check_deltas(config: RunConfig) -> None:
    """Raises ConfigError where there is nothing that changes could be added to, or sent through."""
    if config.weights.transport.name not in ("object_store", "collective"):
        raise ConfigError(
            f"weights.deltas=true with weights.transport={config.weights.transport.name}: treadwheel's own transports alone carry changes; "
            "use weights.transport=object_store or collective, or weights.deltas=false"
        )
    if config.published_adapter is not None:
        raise ConfigError(
            "weights.deltas=true is for whole models, and learner.lora.publish=adapter publishes adapters, which are small; "
            "use weights.deltas=false, or learner.lora.publish=merged"
        )


def check_mathematics(config: RunConfig) -> "Objective":
    with importing():  # torch
        from learner.algorithms.objective import Objective

    try:
        objective = Objective.of_run(config)
        objective.check_group_size(config.buffer.trajectories_per_group, num_candidates=config.judged_per_group)
    except ConfigError as error:
        raise ConfigError(f"algorithm: {error}") from error
    return objective


def check_environment(config: RunConfig, *, is_local: bool) -> None:
    """Variables that judges and environments are promised. Another cluster has an environment of its own."""
    promised = {"reward.env": config.reward.env, "episodes.env": config.episodes.env}
    missing = {field: [name for name in names if name not in os.environ] for field, names in promised.items()}
    told = [
        f"{field} names {', '.join(names)}, not set here; export it, or leave it out"
        for field, names in missing.items()
        if names
    ]
    if is_local and told:
        raise ConfigError("; ".join(told))
