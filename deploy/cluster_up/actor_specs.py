"""Specifications of a run's actors: factory, arguments, resources, and the seat of the placement plan."""

import os
import sys
from dataclasses import replace
from typing import Any

from cluster.contracts.config import RunConfig
from cluster.contracts.types import ActorKind
from cluster.record.run_directory import RunDirectory
from cluster.remote.actor import ActorSpec
from cluster.remote.host import SEARCH_PATH
from cluster.supervision.placement import Bundle, PlacementPlan
from deploy.cluster_up.probe import probe_token_ids


class ActorSpecs:
    def __init__(self, config: RunConfig, placement: PlacementPlan, run_dir: RunDirectory) -> None:
        self._config = config
        self._placement = placement
        self._seats = {bundle: seat for seat, bundle in enumerate(placement.bundles)}
        self._run_dir = run_dir
        self._run = os.path.basename(run_dir.path())

    def learner_ranks(self) -> list[ActorSpec]:
        common = {"run_dir": self._run_dir.path(), "probe_token_ids": probe_token_ids(self._config)}
        return [
            self._seated(bundle, f"learner-{bundle.index}", "learner_rank", rank=bundle.index, **common)
            for bundle in self._placement.of(ActorKind.LEARNER)
        ]

    def rollout_workers(self) -> list[ActorSpec]:
        return [self._rollout_worker(bundle) for bundle in self._placement.of(ActorKind.ROLLOUT_WORKER)]

    def reward_services(self) -> list[ActorSpec]:
        """A single service is named `reward`, several `reward-0`, `reward-1`."""
        bundles = self._placement.of(ActorKind.REWARD_SERVICE)
        names = ["reward"] if len(bundles) == 1 else [f"reward-{bundle.index}" for bundle in bundles]
        return [self._reward_service(bundle, name) for bundle, name in zip(bundles, names, strict=True)]

    def reward_models(self) -> dict[str, ActorSpec]:
        """By their names in `reward.models`."""
        bundles = self._placement.of(ActorKind.REWARD_MODEL)
        return {
            name: self._seated(bundle, f"reward-model-{name}", "reward_model", model=name)
            for name, bundle in zip(self._config.reward.models, bundles, strict=True)
        }

    def judge_servers(self) -> dict[str, list[ActorSpec]]:
        """By their names in `reward.servers`."""
        bundles, specs = iter(self._placement.of(ActorKind.JUDGE_SERVER)), dict[str, list[ActorSpec]]()
        for server, config in self._config.reward.servers.items():
            names = [f"server-{server}-{number}" for number in range(config.num_servers)]
            specs[server] = [
                self._seated(next(bundles), name, "judge_server", server=server, name=name) for name in names
            ]
        return specs

    def reference_scorer(self) -> ActorSpec | None:
        """None if the objective needs no reference log-probs."""
        bundles = self._placement.of(ActorKind.REFERENCE_SCORER)
        return self._seated(bundles[0], "reference", "reference_scorer") if bundles else None

    def recorder(self) -> ActorSpec:
        """In the seat of the first rank, without resources. Without a seat it could be on any node, and a node with an actor never counts
        as idle. It moves with a rank that has a GPU: from another node, a step's trajectories could be lost while the ranks live."""
        first_rank = self._placement.of(ActorKind.LEARNER)[0]
        return ActorSpec(
            name="recorder",
            kind=ActorKind.RECORDER,
            factory="deploy.cluster_up.factories:recorder",
            arguments={
                "run_dir": self._run_dir.path(),
                "keep_steps": self._config.record.keep_trajectories,
                "keep_checkpoints": self._config.checkpoint.keep_last,
            },
            bundle=self._seats[first_rank],
            keeps_to_seat=first_rank.gpus > 0,
            node_labels=self._config.elastic.off_spot,
            run=self._run,
        )

    def joining_worker(self, number: int) -> ActorSpec:
        """A rollout worker beyond the plan."""
        return self._rollout_worker(
            self._unplanned(ActorKind.ROLLOUT_WORKER, number, cpus=self._config.rollout.cpus_per_worker)
        )

    def joining_service(self, number: int) -> ActorSpec:
        """A reward service beyond the plan."""
        bundle = self._unplanned(ActorKind.REWARD_SERVICE, number, cpus=self._config.reward.cpus_per_service)
        return self._reward_service(bundle, f"reward-{number}")

    def _unplanned(self, kind: ActorKind, number: int, *, cpus: float) -> Bundle:
        """Not a seat of the plan: Ray finds a place, or its autoscaler a node.

        Actors that share CPUs hold all of them. Another actor shares them too and asks for none, unless the run is elastic: then it waits
        for nodes.
        """
        shares = self._placement.is_time_shared and self._config.elastic.max_workers is None
        return replace(self._placement.of(kind)[0], index=number, cpus=0.0 if shares else cpus)

    def _reward_service(self, bundle: Bundle, name: str) -> ActorSpec:
        return self._seated(bundle, name, "reward_service", name=name)

    def _rollout_worker(self, bundle: Bundle) -> ActorSpec:
        name, elastic = f"rollout-{bundle.index}", self._config.elastic
        spec = self._seated(bundle, name, "rollout_worker", name=name, run_id=self._run)
        return replace(spec, keeps_to_seat=elastic.spot is not None or elastic.wait_for_nodes_s is not None)

    def _seated(self, bundle: Bundle, actor_name: str, factory: str, **arguments: Any) -> ActorSpec:
        return ActorSpec(
            name=actor_name,
            kind=bundle.kind,
            factory=f"deploy.cluster_up.factories:{factory}",
            arguments={"config": self._config, "num_threads": bundle.num_threads, **arguments},
            num_cpus=bundle.cpus,
            num_gpus=bundle.gpus,
            bundle=self._seats.get(bundle),
            node_labels={} if bundle.may_be_on_spot else self._config.elastic.off_spot,
            run=self._run,
            env={"OMP_NUM_THREADS": str(bundle.num_threads), SEARCH_PATH: os.pathsep.join(sys.path)},
        )
