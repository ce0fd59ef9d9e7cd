"""Builds the plain object that each actor hosts, and first fetches its models to the actor's machine. Imported inside the actors."""

import importlib
import socket
from collections.abc import Sequence
from typing import Any

from cluster.contracts.config import RunConfig
from cluster.contracts.importing import importing_for_good
from cluster.contracts.protocols import Demonstrations
from cluster.record.stored_models import local_model

_IMPORTED_BY_ACTORS = (
    "actors.reference_scorer",
    "actors.reward_model",
    "actors.reward_service.service",
    "actors.rollout.worker",
    "cluster.record.recorder",
    "learner.learner",
    "learner.model.sequence_classification",
    "pydantic.v1.fields",  # Ray imports it in each worker
)


def import_actors() -> None:
    """Imports the modules of all actors on CPUs that compile nothing, except the engine's: for the process from which they are forked."""
    with importing_for_good():
        for module in _IMPORTED_BY_ACTORS:
            importlib.import_module(module)


def import_engine() -> None:
    """Imports the engine's modules."""
    from actors.rollout.vllm_engine import import_all

    with importing_for_good():
        import_all()


def rollout_worker(*, config: RunConfig, num_threads: int, name: str, run_id: str) -> Any:
    with importing_for_good():
        from actors.rollout.worker import RolloutWorker

    return RolloutWorker.with_vllm(_with_local_policy(config), name=name, run_id=run_id, num_threads=num_threads)


def reward_service(*, config: RunConfig, num_threads: int, name: str) -> Any:
    from actors.reward_service.service import RewardService

    return RewardService(config.reward, name=name)


def reward_model(*, config: RunConfig, num_threads: int, model: str) -> Any:
    with importing_for_good():
        from actors.reward_model import Reading, RewardModel
        from learner.model.sequence_classification import SequenceClassifier

    field = f"reward.models.{model}"
    own = local_model(config.reward.models[model], field=field)
    reading = Reading(own, field=field)
    return RewardModel(SequenceClassifier(own, field=field, num_threads=num_threads), reading=reading)


def judge_server(*, config: RunConfig, num_threads: int, server: str, name: str, address: str, token: str) -> Any:
    from actors.judge_server import JudgeServer

    own = local_model(config.reward.servers[server], field=f"reward.servers.{server}")
    return JudgeServer(own, model=server, name=name, address=address, token=token, num_threads=num_threads)


def reference_scorer(*, config: RunConfig, num_threads: int) -> Any:
    with importing_for_good():
        from actors.reference_scorer import ReferenceScorer
        from learner.model.reference import ReferenceModel, reference_models

    distillation = config.algorithm.distillation
    loaded = {
        source: ReferenceModel(
            local_model(model, field=f"reference.by_source.{source}" if source else "reference"),
            reference=config.reference,
            learner=config.learner,
            sampling=config.sampling,
            top_k=distillation and distillation.top_k,
        )
        for source, model in reference_models(config.model, config.reference).items()
    }
    return ReferenceScorer(
        model=loaded[None],
        by_source={source: model for source, model in loaded.items() if source is not None},
        source_column=config.reference.source_column,
        is_deterministic=config.deterministic,
    )


def learner_rank(
    *,
    config: RunConfig,
    num_threads: int,
    rank: int,
    run_dir: str,
    rendezvous: str,
    listener: socket.socket | None = None,
    probe_token_ids: Sequence[int] = (),
) -> Any:
    with importing_for_good():
        from learner.learner import Learner

    base_name = config.model.path
    config = _with_local_critic(_with_local_policy(config))
    return Learner(
        config,
        rank=rank,
        rendezvous=rendezvous,
        listener=listener,
        run_dir=run_dir,
        probe_token_ids=probe_token_ids,
        demonstrations=demonstrations(config),
        base_name=base_name,
    )


def demonstrations(config: RunConfig) -> Demonstrations | None:
    """None without `algorithm.sft`."""
    from actors.chat.demonstrations import SourceDemonstrations

    sft = config.algorithm.sft
    return None if sft is None else SourceDemonstrations(sft, model=config.model, seed=config.seed)


def _with_local_policy(config: RunConfig) -> RunConfig:
    """Fetches only the policy: no machine downloads a model that its actors do not load."""
    return config.model_copy(update={"model": local_model(config.model, field="model")})


def _with_local_critic(config: RunConfig) -> RunConfig:
    if config.algorithm.value is None:
        return config
    value = local_model(config.algorithm.value, field="algorithm.value")
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"value": value})})


def recorder(*, run_dir: str, keep_steps: int | None, keep_checkpoints: int) -> Any:
    from cluster.record.recorder import Recorder
    from cluster.record.run_directory import RunDirectory

    return Recorder(RunDirectory(run_dir), keep_steps=keep_steps, keep_checkpoints=keep_checkpoints)
