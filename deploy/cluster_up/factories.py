"""Builds the plain object that each actor hosts. The only place that knows both sides; imported inside the actors."""

from collections.abc import Sequence
from typing import Any

from cluster.contracts.config import RunConfig
from cluster.contracts.protocols import Demonstrations


def rollout_worker(*, config: RunConfig, num_threads: int, name: str, run_id: str) -> Any:
    from actors.rollout.worker import RolloutWorker

    return RolloutWorker.with_vllm(config, name=name, run_id=run_id, num_threads=num_threads)


def reward_service(*, config: RunConfig, num_threads: int, name: str) -> Any:
    from actors.reward_service.service import RewardService

    return RewardService(config.reward, name=name)


def reward_model(*, config: RunConfig, num_threads: int, model: str) -> Any:
    from actors.reward_model import Reading, RewardModel
    from learner.model.sequence_classification import SequenceClassifier

    own, field = config.reward.models[model], f"reward.models.{model}"
    reading = Reading(own, field=field)
    return RewardModel(SequenceClassifier(own, field=field, num_threads=num_threads), reading=reading)


def judge_server(*, config: RunConfig, num_threads: int, server: str, name: str, address: str, token: str) -> Any:
    from actors.judge_server import JudgeServer

    own = config.reward.servers[server]
    return JudgeServer(own, model=server, name=name, address=address, token=token, num_threads=num_threads)


def reference_scorer(*, config: RunConfig, num_threads: int) -> Any:
    from actors.reference_scorer import ReferenceScorer
    from learner.model.reference import ReferenceModel, reference_models

    distillation = config.algorithm.distillation
    loaded = {
        source: ReferenceModel(
            model,
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
    )


def learner_rank(
    *,
    config: RunConfig,
    num_threads: int,
    rank: int,
    run_dir: str,
    rendezvous: str,
    probe_token_ids: Sequence[int] = (),
) -> Any:
    from learner.learner import Learner

    return Learner(
        config,
        rank=rank,
        rendezvous=rendezvous,
        run_dir=run_dir,
        probe_token_ids=probe_token_ids,
        demonstrations=demonstrations(config),
    )


def demonstrations(config: RunConfig) -> Demonstrations | None:
    """None without `algorithm.sft`."""
    from actors.chat.demonstrations import SourceDemonstrations

    sft = config.algorithm.sft
    return None if sft is None else SourceDemonstrations(sft, model=config.model, seed=config.seed)


def recorder(*, run_dir: str, keep_steps: int | None, keep_checkpoints: int) -> Any:
    from cluster.record.recorder import Recorder
    from cluster.record.run_directory import RunDirectory

    return Recorder(RunDirectory(run_dir), keep_steps=keep_steps, keep_checkpoints=keep_checkpoints)
