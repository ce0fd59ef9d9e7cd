"""Checks of the settings against each other, against the run directory, and against the environment."""

import math
import os
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.importing import importing
from cluster.contracts.learner_config import LoraConfig
from cluster.contracts.plugins import TRANSPORTS, resolve
from cluster.contracts.settings import Mark, fields
from cluster.record.resume_rules import mark_of
from cluster.record.run_directory import CHECKPOINTS, RUN_YAML, RunDirectory
from cluster.record.storage import Storage
from deploy.config.loading import resolved_yaml
from deploy.config.spelling import spelled_out
from deploy.config.written import settings_in

if TYPE_CHECKING:
    from actors.chat.formatter import ChatFormatter
    from learner.algorithms.objective import Objective

_MAX_ADAPTER_RANK = 512

_ELASTIC = ("min_workers", "scale_up_wait_share", "max_step_factor", "scale_down_full_steps")
_ACTING: tuple[tuple[tuple[str, ...], Callable[[RunConfig], bool], str], ...] = (
    (
        tuple(f"elastic.{name}" for name in _ELASTIC),
        lambda config: config.elastic.max_workers is not None,
        "without elastic.max_workers",
    ),
    (
        ("optimizer.min_learning_rate_share",),
        lambda config: config.optimizer.schedule != "constant",
        "with optimizer.schedule='constant'",
    ),
    (
        ("weights.backend",),
        lambda config: config.weights.transport.name != "object_store",
        "with weights.transport='object_store'",
    ),
    (
        ("reference.source_column",),
        lambda config: bool(config.reference.by_source),
        "without reference.by_source",
    ),
    (("episodes.column",), lambda config: bool(config.environments), "without environments"),
    (("reward.environment_weight",), lambda config: config.has_episodes, "without an environment"),
)
"""(settings, the condition under which they act, the other case in words). Without settings that a run file may keep while an override
removes their object: those of an evaluation, of GPUs, of actors that this run does not have."""


def check_run_dir(config: RunConfig) -> None:
    """Also looks at the checkpoint from which the run resumes."""
    from learner.checkpoint.reading import check_newest

    directory = RunDirectory(config.run_dir)
    directory.reach()
    if directory.exists(RUN_YAML):
        settings_in(directory)  # its error names a damaged file
    directory.check(resolved_yaml(config), spelled_out=spelled_out)
    check_newest(Storage(directory.path(CHECKPOINTS)))


def check_effects(config: RunConfig) -> None:
    """Raises ConfigError for settings that have no effect with the others. A resumed run may keep one that is fixed for its life."""
    problems: list[str] = []
    if config.deterministic and (most := config.elastic.max_workers) is not None:
        problems.append(
            f"elastic.max_workers={most} with deterministic=true: the groups of each worker are fixed, so none joins or leaves; leave it "
            "out, and set rollout.num_workers"
        )
    for names, act, case in _ACTING:
        idle = {} if act(config) else _changeable(config, names)
        problems += [f"{name}={value!r} has no effect {case}; leave it out" for name, value in idle.items()]
    if not RunDirectory(config.run_dir).exists(RUN_YAML):
        problems += _penalties_beyond_reach(config)
        problems += _revisions_of_folders(config)
    if problems:
        raise ConfigError("; ".join(problems))


def _penalties_beyond_reach(config: RunConfig) -> list[str]:
    """Length penalties that no completion gets. Episodes and recorded completions have other limits than `sampling.max_tokens`."""
    longest = math.inf if config.has_episodes or config.recorded is not None else config.sampling.max_tokens
    found: list[str] = []
    for index, each in enumerate(config.algorithm.reward_shaping):
        most, cache = each.params.get("max_length"), each.params.get("cache")
        if (
            each.name == "overlong_penalty"
            and isinstance(most, int)
            and isinstance(cache, int)
            and most - cache >= longest
        ):
            found.append(
                f"algorithm.reward_shaping[{index}]='overlong_penalty' begins after max_length={most} - cache={cache} tokens, and "
                f"sampling.max_tokens={longest} ends every completion before; leave max_length out, raise cache, or leave the penalty out"
            )
    return found


def _revisions_of_folders(config: RunConfig) -> list[str]:
    """Revisions of the hub for models that are local folders."""
    reward = config.reward
    models = {
        "model": config.model,
        "reference": config.reference,
        "algorithm.value": config.algorithm.value,
        **{f"reward.models.{name}": model for name, model in reward.models.items()},
        **{f"reward.servers.{name}": server for name, server in reward.servers.items()},
    }
    return [
        f"{name}.revision={model.revision!r} has no effect on the folder {name}.path={model.path!r}; leave it out, or set it to null"
        for name, model in models.items()
        if model and model.revision and model.path and os.path.isdir(os.path.expanduser(model.path))
    ]


def check_reference_is_asked(config: RunConfig, *, needs: Collection[str]) -> None:
    """Raises ConfigError for a reference model that the algorithm never asks. As in `check_effects`, a resumed run may keep it."""
    named = _changeable(config, ("reference.path", "reference.by_source"))
    if named and "reference_logprobs" not in needs:
        name, value = next(iter(named.items()))
        raise ConfigError(
            f"{name}={value!r} is never asked: no setting of `algorithm` uses the reference; leave it out, or set algorithm.kl, "
            "algorithm.distillation or algorithm.monitor.reference_kl"
        )


def _changeable(config: RunConfig, names: Collection[str]) -> dict[str, Any]:
    """Name and value of the settings among `names` (`section.setting`) that differ from the default and that the run may still change."""
    known, found = dict(fields(RunConfig)), dict[str, Any]()
    for name in names:
        section, _, own = name.partition(".")
        value = getattr(getattr(config, section), own)
        if value != known[name].get_default(call_default_factory=True):
            found[name] = value
    if found and RunDirectory(config.run_dir).exists(RUN_YAML):
        return {name: value for name, value in found.items() if mark_of(name, {}) is not Mark.MATHEMATICS}
    return found


def check_compute_type(config: RunConfig) -> None:
    """Raises ConfigError for `auto` on hardware that is not at hand."""
    if config.model.dtype == "auto":
        raise ConfigError(
            "model.dtype='auto' asks the machine, which is not at hand; write bfloat16 or float32, as that machine would choose"
        )


def check_tensor_parallel(config: RunConfig) -> None:
    needed, gpus = config.rollout.tensor_parallel_size, config.rollout.gpus_per_worker
    if needed > 1 and 0 < gpus < needed:
        raise ConfigError(
            f"rollout.tensor_parallel_size={needed} needs {needed} GPUs, and rollout.gpus_per_worker={gpus:g}; set "
            f"rollout.gpus_per_worker={needed}, or 0 for an engine on CPUs"
        )
    if gpus > needed:
        raise ConfigError(
            f"rollout.gpus_per_worker={gpus:g} with rollout.tensor_parallel_size={needed}: the engine computes on {needed}, and the rest "
            f"would be idle; set rollout.gpus_per_worker={needed}, or raise rollout.tensor_parallel_size"
        )


def check_json_schema(config: RunConfig) -> None:
    if (schema := config.sampling.json_schema) is None:
        return
    import jsonschema  # a slow import
    import jsonschema.validators

    try:
        jsonschema.validators.validator_for(schema).check_schema(schema)
    except jsonschema.SchemaError as error:
        place = "".join(f".{key}" for key in error.absolute_path)
        raise ConfigError(f"sampling.json_schema{place} is no JSON schema: {error.message}; mend it") from error


def check_gpus(config: RunConfig) -> None:
    """Raises ConfigError for an actor that would reserve GPUs without using them, or that Ray does not place."""
    each = {"learner.gpus_per_rank": config.learner.gpus_per_rank, "reference.gpus": config.reference.gpus}
    each |= {f"reward.models.{name}.gpus": model.gpus for name, model in config.reward.models.items()}
    problems = [
        f"{name}={gpus:g}: its process computes on one GPU, and the rest would be idle; use 1, or a share of one"
        for name, gpus in each.items()
        if gpus > 1
    ]
    if (gpus := config.reward.gpus_per_service) > 1 and not gpus.is_integer():
        problems.append(f"reward.gpus_per_service={gpus:g}: Ray shares no GPU above one; use a whole number")
    if problems:
        raise ConfigError("; ".join(problems))


def check_ranks_apart(config: RunConfig) -> None:
    """Raises ConfigError for ranks that Ray would put on one GPU, which NCCL does not support. Ray fills the fullest GPU first."""
    learner, rollout = config.learner, config.rollout
    share = learner.gpus_per_rank + (rollout.gpus_per_worker if rollout.colocated else 0.0)
    if learner.num_ranks == 1 or not 0 < share <= 0.5:
        return
    workers = f" with rollout.gpus_per_worker={rollout.gpus_per_worker:g}" if rollout.colocated else ""
    raise ConfigError(
        f"learner.num_ranks={learner.num_ranks} with learner.gpus_per_rank={learner.gpus_per_rank:g}{workers}: two ranks fit on one GPU, "
        "which NCCL does not support; use more than half a GPU for each, or one rank"
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
            f"weights.backend=nccl needs whole GPUs for learner and workers, but learner.gpus_per_rank={learner.gpus_per_rank:g} and "
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
            f"learner.lora.rank={adapter.rank} with learner.lora.publish='adapter': vLLM supports adapters up to rank "
            f"{_MAX_ADAPTER_RANK}; lower it, or use learner.lora.publish=merged"
        )
    if config.rollout.gpus_per_worker and config.model.dtype == "float32":
        raise ConfigError(
            "learner.lora.publish='adapter' with model.dtype='float32' and engines on GPUs: vLLM's adapter kernels compute in bfloat16; "
            "use model.dtype=bfloat16, or learner.lora.publish=merged"
        )


def _check_deltas(config: RunConfig) -> None:
    """Raises ConfigError for a transport that cannot carry changes, and for adapters, which have no changes to send."""
    if config.weights.transport.name not in ("object_store", "collective"):
        raise ConfigError(
            f"weights.deltas=true with weights.transport={config.weights.transport.name}: only treadwheel's own transports carry changes; "
            "use weights.transport=object_store or collective, or weights.deltas=false"
        )
    if config.published_adapter is not None:
        raise ConfigError(
            "weights.deltas=true is for whole models, and learner.lora.publish=adapter publishes adapters, which are small; "
            "use weights.deltas=false, or learner.lora.publish=merged"
        )


def check_mathematics(config: RunConfig, *, keeps_inert: bool = False) -> "Objective":
    """Rewards are not checked for a run that resumes: it knows its own. Nor are options without effect, which it could not change."""
    with importing():  # torch
        from learner.algorithms.objective import Objective

    try:
        run_dir = RunDirectory(config.run_dir)
        is_there = run_dir.exists(RUN_YAML)
        objective = Objective.of_run(config, keeps_inert=keeps_inert or (is_there and run_dir.has_finished_a_step()))
        objective.check_parts(config.buffer.trajectories_per_group)
        objective.check_group_size(config.buffer.trajectories_per_group, num_candidates=config.judged_per_group)
        if not is_there:
            objective.check_rewards()
    except ConfigError as error:
        raise ConfigError(f"algorithm: {error}") from error
    return objective


def check_stops(config: RunConfig, formatter: "ChatFormatter") -> None:
    """Raises ConfigError for a text of `sampling.stop` that no completion can contain. A run that resumes keeps it."""
    lost = [stop for stop in config.sampling.stop if formatter.is_never_found(stop)]
    if not lost:
        return
    run_dir = RunDirectory(config.run_dir)
    if not (run_dir.exists(RUN_YAML) and run_dir.has_finished_a_step()):
        raise ConfigError(
            f"sampling.stop has {lost[0]!r}, a special token of the model: texts of completions leave these out, so it would end none; "
            "add its id to eos_token_id in the model's generation_config.json, and leave it out here"
        )


def check_environment(config: RunConfig, *, is_local: bool) -> None:
    """Raises ConfigError for variables of judges and environments that are not set. Another cluster has its own environment."""
    passed_on = {"reward.env": config.reward.env, "episodes.env": config.episodes.env}
    missing = {field: [name for name in names if name not in os.environ] for field, names in passed_on.items()}
    problems = [
        f"{field} names {', '.join(names)}, not set here; export it, or leave it out"
        for field, names in missing.items()
        if names
    ]
    if is_local and problems:
        raise ConfigError("; ".join(problems))
