"""Checks of the machine: room for the actors, and memory for model and batch."""

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from cluster.machine import free_memory_bytes, num_cpus
from cluster.supervision.asked_nodes import plan_asked
from cluster.supervision.placement import ClusterResources, Node, PlacementPlan, needs_reference, plan, plan_learning
from deploy.cluster_up.ahead import named
from deploy.preflight.engine_memory import on_cpus_bytes, weights_bytes
from learner.shape import read_config

GIB = 1024**3
_BYTES_PER_TOKEN = 48
"""Of a trajectory's token, in the store and in the learner's tensors: ids, log-probs, versions, mask, advantages."""
_DEVICES = Path("/dev")
_LEAST_OF_ESTIMATE = 2 / 3
"""Estimates are right within about a third: a run is refused if even two thirds of its estimate are too much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of a run by actor, in bytes."""

    num_parameters: int
    dtype: str
    rank: int
    worker: int
    cache: str
    """Place of a worker's key-value cache, in words."""
    reference: int | None
    """None without a reference scorer."""
    judging: dict[str, int]
    """Reward models and judge servers, by their description."""
    total: int
    free: int | None
    """None if the run does not use this machine's memory alone."""


def is_own_cluster(address: str | None) -> bool:
    """Whether a run starts its own cluster, on this machine."""
    return named(address) is None


def this_machine() -> ClusterResources:
    """The resources that a local Ray will find here."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # As CUDA and Ray read it: an invalid name hides itself and all names after it.
    num_gpus = _num_gpus() if visible is None else len([*itertools.takewhile(_is_gpu, visible.split(","))])
    return ClusterResources(nodes=(Node(cpus=float(num_cpus()), gpus=float(num_gpus)),))


def _num_gpus() -> int:
    # WSL2 has this device in the place of NVIDIA's: only NVML, by which Ray counts, knows the GPUs there.
    if (_DEVICES / "dxg").exists():
        from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

        return NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()
    return len([*_DEVICES.glob("nvidia[0-9]*")])


def _is_gpu(visible: str) -> bool:
    return visible.strip() not in ("", "NoDevFiles") and not visible.strip().startswith("-")


def place(config: RunConfig, needs: frozenset[str], *, is_local: bool) -> PlacementPlan | None:
    """None: the run is placed once it has connected to its cluster."""
    wait_s = config.elastic.wait_for_nodes_s if config.recorded is None else None
    if wait_s is not None and is_local:
        raise ConfigError(
            f"elastic.wait_for_nodes_s={wait_s:g}: no node joins a cluster that the run starts for itself; name a running one "
            "(--address, or RAY_ADDRESS), or leave it out"
        )
    if wait_s is not None:
        return plan_asked(config, needs=needs)
    planned = plan if config.recorded is None else plan_learning
    return planned(config, this_machine(), needs=needs) if is_local else None


def estimate(config: RunConfig, needs: frozenset[str], *, is_local: bool) -> Memory:
    """Raises ConfigError for a run on this machine's CPUs that cannot fit into its free memory."""
    from learner import memory
    from learner.model.sequence_classification import num_bytes

    rank = memory.of_run(config)
    item = config.model.item_bytes
    weights = rank.num_parameters * item
    num_workers = config.rollout.num_workers if config.recorded is None else 0
    on_gpus = config.rollout.gpus_per_worker > 0 and num_workers > 0
    text = read_config(config.model).get_text_config()
    served = weights_bytes(text, config.rollout, num_parameters=rank.num_parameters, item=item)
    on_cpus = on_cpus_bytes(text, config.rollout, weights=served) + arriving_bytes(config, weights)
    worker = served if on_gpus else on_cpus
    reference = memory.of_reference(config) if needs_reference(config, needs=needs) else None
    judging, on_cpu = dict[str, int](), 0
    for name, model in config.reward.models.items() if config.recorded is None else ():
        size = judging[f"reward model {name}"] = num_bytes(model, field=f"reward.models.{name}")
        on_cpu += 0 if model.gpus else size
    for name, server in config.reward.servers.items() if config.recorded is None else ():
        size = num_bytes(server, field=f"reward.servers.{name}") + (0 if server.gpus else server.kv_cache_bytes)
        judging[f"judge server {name} x {server.num_servers}"] = size
        on_cpu += 0 if server.gpus else size * server.num_servers
    kept = kept_bytes(config, weights) if num_workers else 0
    total = on_cpu + rank.all_bytes(config.learner.num_ranks) + kept + worker * num_workers + (reference or 0)
    free = memory.free_bytes() if is_local else None
    is_here = free is not None and not on_gpus and config.learner.gpus_per_rank == 0
    if free is not None and is_here:
        memory.check_fits(rank, free_bytes=free, model=config.model)
        _check_total(config, total, free, num_workers=num_workers)
    return Memory(
        num_parameters=rank.num_parameters,
        dtype=config.model.dtype,
        rank=rank.total_bytes,
        worker=worker,
        cache=f"and the cache in {config.rollout.gpu_memory_utilization:.0%} of its GPU"
        if on_gpus
        else "with its cache",
        reference=reference,
        judging=judging,
        total=total,
        free=free if is_here else None,
    )


def arriving_bytes(config: RunConfig, weights: int) -> int:
    """Bytes that a worker takes beside its engine while it loads a version. An engine of several processes gets the version as one list,
    of which each process has a copy (`actors.rollout.vllm_engine.VllmEngine.load`). With `weights.transport=collective` each process
    takes buckets. `weights.deltas` keeps one more copy: in the worker, or in each process that takes buckets."""
    deltas, parallel = int(config.weights.deltas), config.rollout.tensor_parallel_size
    if _goes_through_groups(config):
        return _published_bytes(config, weights) * deltas * parallel
    return _published_bytes(config, weights) * (deltas + (1 + parallel if parallel > 1 else 0))


def kept_bytes(config: RunConfig, weights: int) -> int:
    """Bytes that the learner's first rank keeps in its node's memory: the last version, with `weights.transport=collective` or
    `weights.deltas`. Deltas add the changes, at most half a version, and once more in the object store if they go through it."""
    published, groups = _published_bytes(config, weights), _goes_through_groups(config)
    if config.weights.deltas:
        return published + published // 2 * (1 if groups else 2)
    return published if groups else 0


def stored_bytes(config: RunConfig, weights: int) -> int:
    """Bytes of a version in the object store."""
    return 0 if _goes_through_groups(config) else _published_bytes(config, weights)


def _published_bytes(config: RunConfig, weights: int) -> int:
    """Bytes of a version that goes to workers; 0 for an adapter."""
    lora = config.learner.lora
    return weights if lora is None or lora.publish == "merged" else 0


def _goes_through_groups(config: RunConfig) -> bool:
    return config.weights.transport.name == "collective"


def check_batch(config: RunConfig, *, is_local: bool) -> None:
    """Raises ConfigError for a step whose trajectories cannot fit into this machine's free memory."""
    if not is_local:
        return
    free = free_memory_bytes()
    buffer, longest = config.buffer, config.sampling.max_tokens
    distillation = config.algorithm.distillation
    per_token = _BYTES_PER_TOKEN + (16 * (distillation.top_k + 1) if distillation else 0)
    size_bytes = buffer.groups_per_step * buffer.trajectories_per_group * longest * per_token
    if size_bytes > free:
        raise ConfigError(
            f"buffer.groups_per_step={buffer.groups_per_step} x buffer.trajectories_per_group={buffer.trajectories_per_group} x "
            f"sampling.max_tokens={longest}: a step's trajectories may take {size_bytes / GIB:,.1f} GiB, and {free / GIB:,.1f} GiB are "
            "free; lower one of these settings"
        )


def _check_total(config: RunConfig, total: int, free: int, *, num_workers: int) -> None:
    if total * _LEAST_OF_ESTIMATE > free:
        workers, cache = (
            (f"rollout.num_workers={num_workers}, ", "rollout.kv_cache_bytes or rollout.max_concurrent_sequences or ")
            if num_workers
            else ("", "")
        )
        cache += "reward.servers.<name>.kv_cache_bytes or " if config.reward.servers else ""
        raise ConfigError(
            f"{workers}learner.num_ranks={config.learner.num_ranks}: all actors together take about {total / GIB:,.1f} GiB, "
            f"{free / GIB:,.1f} GiB are free; lower one of these, {cache}learner.max_tokens_per_micro_batch, or take a smaller model"
        )


def gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f}"
