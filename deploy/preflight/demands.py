"""Memory that each actor of a run takes on a GPU and on its node, by formula. Of a model only config.json is read."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.reward_config import JudgeServerConfig
from cluster.contracts.types import ActorKind
from cluster.supervision.placement import needs_reference
from deploy.preflight.engine_memory import (
    ENGINE_CONTEXT_BYTES,
    EngineMemory,
    check_divisible,
    of_engine,
    on_cpus_bytes,
    weights_bytes,
)
from deploy.preflight.machine import GIB, arriving_bytes, gib, kept_bytes, stored_bytes
from deploy.preflight.problems import Problems
from deploy.preflight.quantization import check_layers
from learner.shape import read_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from learner.memory import MemoryEstimate

CONTEXT_BYTES = GIB
"""CUDA's context and NCCL's buffers beside an actor's tensors: an allowance, not a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Memory of one actor, in bytes."""

    gpu: int = 0
    """On each of its GPUs."""
    host: int = 0
    """On its node, without the published weights, of which a node has one copy."""
    turn: ActorKind | None = None
    """The turn in which it takes `gpu` bytes (`rollout.colocated`); None: always."""
    asleep: int = 0
    """On each of its GPUs in another actor's turn: memory that its process cannot give back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    rank: "MemoryEstimate"
    engine: EngineMemory | None
    """None: engines on CPUs, or an engine that does not fit."""
    max_context: int
    """Tokens of a sequence in an engine."""
    published: int
    """Bytes of a version of the weights in the object store."""
    of_actors: dict[str, Demand]
    """By the name of the actor's seat."""


def demands(config: RunConfig, *, gpu_bytes: int, needs: Collection[str], problems: Problems) -> Demands:
    """`gpu_bytes`: memory of one GPU, 0 without GPUs. Actors that do not fit even alone are problems.

    Raises ConfigError for a model configuration that cannot be read.
    """
    from learner import memory

    text = read_config(config.model).get_text_config()
    max_context = config.model.max_context or text.max_position_embeddings
    rank, engine = memory.of_run(config), None
    if config.learner.gpus_per_rank and gpu_bytes:
        problems.attempt(memory.check_fits, rank, free_bytes=gpu_bytes - CONTEXT_BYTES, model=config.model)
    if config.rollout.gpus_per_worker and gpu_bytes:
        engine = problems.attempt(
            _engine, text, config, num_parameters=rank.num_parameters, gpu_bytes=gpu_bytes, max_context=max_context
        )
    num_parameters, item = rank.num_parameters, config.model.item_bytes
    weights = num_parameters * item
    problems.attempt(check_layers, text, config)
    if not config.rollout.gpus_per_worker:
        problems.attempt(check_divisible, text, config.rollout.tensor_parallel_size)
    served = weights_bytes(text, config.rollout, num_parameters=num_parameters, item=item)
    of_actors = _ranks(config, rank, weights=weights) | _workers(config, text, gpu_bytes, weights, served=served)
    if needs_reference(config, needs=needs):
        size = (problems.attempt(memory.of_reference, config) or 0) + CONTEXT_BYTES
        of_actors["reference_scorer-0"] = _on(config.reference.gpus, size)
        if config.reference.gpus and gpu_bytes:
            problems.attempt(_check_scorer, size, gpu_bytes=gpu_bytes, field="reference")
    return Demands(
        rank=rank,
        engine=engine,
        max_context=max_context,
        published=stored_bytes(config, weights),
        of_actors=of_actors | _judging(config, gpu_bytes, problems),
    )


def _on(gpus: float, size: int) -> Demand:
    return Demand(gpu=size) if gpus else Demand(host=size)


def _ranks(config: RunConfig, rank: "MemoryEstimate", *, weights: int) -> dict[str, Demand]:
    """On GPUs, host memory holds a checkpoint while it is written: each rank's state, and with the first rank the model, of which a
    synchronous save holds one file at a time. A single rank loads the model into host memory first. The first rank may keep the version
    that it sends to workers. A rank that takes turns with a worker moves weights and optimizer to host memory."""
    from learner.checkpoint.model_folder import MAX_FILE_BYTES

    learner = config.learner
    kept = [kept_bytes(config, weights), *[0] * (learner.num_ranks - 1)]
    if not learner.gpus_per_rank:
        others = rank.total_bytes - rank.copied_model_bytes
        each = [rank.total_bytes, *[others] * (learner.num_ranks - 1)]
        return {f"learner-{i}": Demand(host=sum(sizes)) for i, sizes in enumerate(zip(each, kept, strict=True))}
    state = rank.saved_bytes - weights
    model = weights if config.checkpoint.asynchronous else min(weights, MAX_FILE_BYTES)
    hosts = [max(state + model, rank.loading_bytes), *[state] * (learner.num_ranks - 1)]
    takes_turns = config.rollout.colocated
    resting = rank.weights_bytes + rank.optimizer_bytes if takes_turns else 0
    turn = ActorKind.LEARNER if takes_turns else None
    return {
        f"learner-{index}": Demand(
            gpu=rank.needed_bytes + CONTEXT_BYTES, host=host + size + resting, turn=turn, asleep=CONTEXT_BYTES
        )
        for index, (host, size) in enumerate(zip(hosts, kept, strict=True))
    }


def _workers(
    config: RunConfig, text: "PretrainedConfig", gpu_bytes: int, weights: int, *, served: int
) -> dict[str, Demand]:
    """`served`: bytes of the weights in an engine, quantized or not."""
    rollout, copies = config.rollout, arriving_bytes(config, weights)
    if rollout.gpus_per_worker:
        # A sleeping engine keeps its weights in host memory.
        demand = Demand(
            gpu=int(rollout.gpu_memory_utilization * gpu_bytes),
            host=copies + (served if rollout.colocated else 0),
            turn=ActorKind.ROLLOUT_WORKER if rollout.colocated else None,
            asleep=ENGINE_CONTEXT_BYTES,
        )
    else:
        demand = Demand(host=on_cpus_bytes(text, rollout, weights=served) + copies)
    return {f"rollout_worker-{index}": demand for index in range(rollout.num_workers)}


def _judging(config: RunConfig, gpu_bytes: int, problems: Problems) -> dict[str, Demand]:
    """Reward services count as 0: the memory of the user's judges is unknown."""
    from learner.memory import reading_bytes
    from learner.model.sequence_classification import as_model, num_bytes

    found = {f"reward_service-{index}": Demand() for index in range(config.reward.num_services)}
    for index, (name, model) in enumerate(config.reward.models.items()):
        weights = problems.attempt(num_bytes, model, field=f"reward.models.{name}")
        tokens, on_gpu = model.max_tokens_per_micro_batch, model.gpus > 0
        passes = 0 if weights is None else reading_bytes(as_model(model), max_tokens=tokens, on_gpu=on_gpu)
        size = (weights or 0) + passes + CONTEXT_BYTES
        found[f"reward_model-{index}"] = _on(model.gpus, size)
        if on_gpu and gpu_bytes:
            problems.attempt(_check_scorer, size, gpu_bytes=gpu_bytes, field=f"reward.models.{name}")
    servers = [(name, server) for name, server in config.reward.servers.items() for _ in range(server.num_servers)]
    for index, (name, server) in enumerate(servers):
        weights = problems.attempt(num_bytes, server, field=f"reward.servers.{name}") or 0
        if server.gpus and gpu_bytes:
            problems.attempt(_check_server, server, weights, gpu_bytes=gpu_bytes, field=f"reward.servers.{name}")
        taken = int(server.gpu_memory_utilization * gpu_bytes)
        found[f"judge_server-{index}"] = (
            Demand(gpu=taken) if server.gpus else Demand(host=weights + server.kv_cache_bytes)
        )
    return found


def _engine(
    text: "PretrainedConfig", config: RunConfig, *, num_parameters: int, gpu_bytes: int, max_context: int
) -> EngineMemory:
    """Raises ConfigError for an engine whose cache cannot hold one sequence of the whole context: vLLM would not start."""
    rollout = config.rollout
    engine = of_engine(
        text,
        rollout,
        num_parameters=num_parameters,
        item=config.model.item_bytes,
        gpu_bytes=gpu_bytes,
        max_context=max_context,
    )
    if engine.num_tokens < max_context:
        raise ConfigError(
            f"rollout.gpu_memory_utilization={rollout.gpu_memory_utilization:g} of a GPU is {gib(engine.taken_bytes)} GiB; weights "
            f"{gib(engine.weights_bytes)} and passes {gib(engine.passes_bytes)} leave a key-value cache of {max(engine.num_tokens, 0):,} "
            f"tokens, and a sequence may have {max_context:,}; raise it, raise rollout.tensor_parallel_size with rollout.gpus_per_worker, "
            "or lower model.max_context or rollout.max_concurrent_sequences"
        )
    return engine


def _check_scorer(size: int, *, gpu_bytes: int, field: str) -> None:
    """Raises ConfigError for a scorer that is too large for a whole GPU."""
    if size > gpu_bytes:
        raise ConfigError(
            f"{field}: weights and a pass take about {gib(size)} GiB, and a GPU has {gib(gpu_bytes)} GiB; lower "
            f"{field}.max_tokens_per_micro_batch, or take a smaller model"
        )


def _check_server(server: JudgeServerConfig, weights: int, *, gpu_bytes: int, field: str) -> None:
    taken, on_each = int(server.gpu_memory_utilization * gpu_bytes), weights // max(1, int(server.gpus))
    if on_each + CONTEXT_BYTES > taken:
        raise ConfigError(
            f"{field}.gpu_memory_utilization={server.gpu_memory_utilization:g} of a GPU is {gib(taken)} GiB, and weights take "
            f"{gib(on_each)} GiB of each GPU; raise it, raise {field}.gpus, or take a smaller model"
        )
