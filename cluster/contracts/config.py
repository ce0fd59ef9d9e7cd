"""The run's configuration: all sections, and the rules between them. It is frozen and has no unknown keys; each value is declared once.

The rules within one section are in that section's module.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.environment_config import SINGLE_TURN, EpisodesConfig
from cluster.contracts.errors import DataError
from cluster.contracts.learner_config import LearnerConfig, LoraConfig, ModelConfig, OptimizerConfig, ReferenceConfig
from cluster.contracts.plugins import Plugin
from cluster.contracts.prompts_config import PromptsConfig
from cluster.contracts.reward_config import RewardConfig
from cluster.contracts.rollout_config import BufferConfig, RolloutConfig, WeightsConfig
from cluster.contracts.sampling_config import EvaluationConfig, SamplingConfig
from cluster.contracts.settings import Mathematics, Resources, Section
from cluster.contracts.upkeep_config import (
    CheckpointConfig,
    ElasticConfig,
    MetricsConfig,
    MismatchConfig,
    RecordConfig,
    SupervisionConfig,
)

_MOST_BIASED_ON_A_GPU = 1024
"""vLLM's limit for tokens in a request's `logit_bias`. On CPUs there is none."""
_NUM_TRIES = 3
"""Tries of an episode whose process dies: with others, with others again, alone."""


class RunConfig(Section):
    """One run. The README's quickstart is deploy/runs/quickstart.yaml."""

    run_dir: Resources[str] = "runs/run"
    """A local path, which all nodes must mount, or s3://, gs:// or az:// with bucket and prefix (docs/object_stores.md)."""
    seed: Mathematics[Annotated[int, Field(ge=0, lt=2**63)]] = 0
    """Seed of the order of prompts and of all sampling."""
    num_steps: Resources[PositiveInt] = 100
    """Length of the run in steps. A step takes `buffer.groups_per_step` groups, makes the optimizer updates of `learner.epochs` and
    `learner.mini_batches`, and ends with a new policy version."""
    deterministic: Mathematics[bool] = False
    """Makes a CPU run repeatable bit for bit: fixed batch compositions, one thread order, seeds by prompt and sample. With
    `buffer.max_off_policy_steps` above 0, timing decides which policy version samples a token; only learning from the record repeats
    then."""
    model: ModelConfig
    prompts: PromptsConfig
    """A name below actors.prompts with its parameters, or `sources`. Texts in a file are formatted with the model's chat template if it has
    one; `text_as: text` sends them unchanged, `text_as: user_message` requires the template."""
    recorded: Mathematics[str | None] = None
    """Learns from recorded trajectories instead of sampling: a run directory, a folder of .arrow files, or one such file. `treadwheel
    learn` sets it. The record's log-probs are another policy's, of any age: `buffer.max_off_policy_steps` has no effect, and
    `algorithm.corrections` weigh the gap."""
    environment: Mathematics[Plugin] = SINGLE_TURN
    """The environment of all prompts: a name below actors.environments, or a function of yours as 'my_package.module:name', with its
    parameters. `single_turn` samples one completion of each prompt."""
    environments: Mathematics[dict[str, Plugin]] = Field(default={})
    """Several environments by name. The prompts' column `episodes.column` names the environment of each prompt."""
    episodes: EpisodesConfig = EpisodesConfig()
    sampling: SamplingConfig = SamplingConfig()
    reward: RewardConfig = RewardConfig()
    buffer: BufferConfig = BufferConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    learner: LearnerConfig = LearnerConfig()
    rollout: RolloutConfig = RolloutConfig()
    reference: ReferenceConfig = ReferenceConfig()
    weights: WeightsConfig = WeightsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    mismatch: MismatchConfig = MismatchConfig()
    elastic: ElasticConfig = ElasticConfig()
    record: RecordConfig = RecordConfig()
    metrics: MetricsConfig = MetricsConfig()

    def environment_of(self, columns: Mapping[str, Any]) -> str:
        """Name of a prompt's environment, a key of `named_environments`. Raises DataError for a prompt that names none."""
        if not self.environments:
            return _label(self.environment)
        name = columns.get(self.episodes.column)
        if not isinstance(name, str) or name not in self.environments:
            raise DataError(
                f"environments has no entry for {name!r} (column {self.episodes.column!r}); it has: {', '.join(self.environments)}"
            )
        return name

    @property
    def named_environments(self) -> dict[str, Plugin]:
        """All environments, by their names in rows and metrics."""
        return self.environments or {_label(self.environment): self.environment}

    def environment_setting(self, name: str) -> str:
        """The setting of the environment with this name."""
        return f"environments.{name}" if self.environments else "environment"

    @property
    def has_episodes(self) -> bool:
        """Whether some prompts may have more than one turn."""
        return any(map(self.is_played, self.named_environments))

    @property
    def judges_nothing(self) -> bool:
        """Whether all rewards come from environments."""
        is_single = any(not self.is_played(name) for name in self.named_environments)
        return not is_single and not self.reward.judges_episodes

    def is_played(self, environment: str) -> bool:
        """Whether the environment of this name is run; a single turn is sampled without one."""
        return self.named_environments[environment] != SINGLE_TURN

    @model_validator(mode="after")
    def _require_environments_that_are_used(self) -> "RunConfig":
        if self.environments and self.environment != SINGLE_TURN:
            raise ValueError(
                f"environment={self.environment.name!r} with environments {', '.join(self.environments)}: move it into environments under "
                "a name, or leave one of them out"
            )
        for name in self.environments:
            if not name.replace("_", "").isalnum():
                raise ValueError(f"environments.{name}: a name has letters, digits and _ only; rename it")
        if self.deterministic and self.has_episodes and not all(map(self.is_played, self.environments)):
            raise ValueError(
                "deterministic=true with single turns and environments: timing decides whether a single turn ends before the next turn "
                "of an episode starts; leave single_turn out of environments"
            )
        if not self.has_episodes and self.episodes != EpisodesConfig():
            raise ValueError("episodes is set, but without an environment every prompt has a single turn; leave it out")
        return self

    @model_validator(mode="after")
    def _require_a_part_with_a_weight(self) -> "RunConfig":
        parts = self.reward.parts.values()
        if parts and not self.has_episodes and not any(part.weight for part in parts):
            raise ValueError("reward.parts: every part has weight 0, so every reward is 0; give one a weight")
        return self

    @model_validator(mode="after")
    def _require_recipes_for_the_sources(self) -> "RunConfig":
        reward, held_out = self.reward, self.evaluation.prompts
        named = [*self.prompts.sources, *(held_out.sources if held_out else ())]
        if reward.source_column != "source" and not reward.by_source and not named:
            raise ValueError(
                f"reward.source_column={reward.source_column!r} has no effect without reward.by_source or prompts.sources; leave it out"
            )
        missing = [name for name in named if reward.by_source and name not in reward.by_source]
        if missing:
            raise ValueError(
                f"reward.by_source has no entry for the source {missing[0]!r} of prompts.sources or evaluation.prompts.sources; it has: "
                f"{', '.join(reward.by_source)}"
            )
        is_known = self.prompts.sources and (held_out is None or held_out.sources)
        unused = [name for name in reward.by_source if is_known and name not in named]
        if unused:
            raise ValueError(f"reward.by_source.{unused[0]}: no source has this name; there are: {', '.join(named)}")
        return self

    @model_validator(mode="after")
    def _require_a_trajectory_for_every_rank(self) -> "RunConfig":
        groups, size = self.buffer.groups_per_step, self.buffer.trajectories_per_group
        count, units = self.learner.mini_batches, groups if self.learner.split_by == "groups" else groups * size
        if count > units:
            raise ValueError(
                f"learner.mini_batches={count} is more than the {units} {self.learner.split_by} of a step; use fewer, or raise "
                "buffer.groups_per_step"
            )
        smallest = units // count * (groups * size // units)
        if smallest < self.learner.data_parallel_size:
            size = self.learner.sequence_parallel_size
            shared = f" in groups of learner.sequence_parallel_size={size}" if size > 1 else ""
            raise ValueError(
                f"learner.num_ranks={self.learner.num_ranks}{shared} is more than the {smallest} trajectories of an update; "
                "use fewer ranks or learner.mini_batches, or raise buffer.groups_per_step or buffer.trajectories_per_group"
            )
        return self

    @model_validator(mode="after")
    def _require_an_attention_that_ranks_split(self) -> "RunConfig":
        if self.learner.sequence_parallel_size > 1 and self.model.attention not in ("auto", "sdpa"):
            raise ValueError(
                f"learner.sequence_parallel_size={self.learner.sequence_parallel_size} needs the attention of packed rows, and "
                f"model.attention={self.model.attention!r} is another; use model.attention=auto"
            )
        return self

    @model_validator(mode="after")
    def _require_a_worker_for_every_rank_in_turn(self) -> "RunConfig":
        if not self.rollout.colocated:
            return self
        rollout, learner, elastic = self.rollout, self.learner, self.elastic
        gpus = (learner.gpus_per_rank, rollout.gpus_per_worker)
        wrong: list[str] = []
        if bound := self.buffer.max_off_policy_steps:
            wrong.append(
                f"buffer.max_off_policy_steps={bound}: workers would sample while the learner learns; set it to 0"
            )
        for name in ("max_workers", "spot", "wait_for_nodes_s"):
            if (value := getattr(elastic, name)) is not None:
                wrong.append(f"elastic.{name}={value}: workers stay beside the learner's ranks; leave it out")
        if rollout.num_workers != learner.num_ranks:
            wrong.append(
                f"rollout.num_workers={rollout.num_workers} and learner.num_ranks={learner.num_ranks}: a worker is beside each rank; "
                "use the same number"
            )
        if rollout.tensor_parallel_size > 1:
            wrong.append(
                f"rollout.tensor_parallel_size={rollout.tensor_parallel_size}: an engine shares the GPU of one rank; set it to 1"
            )
        if any(gpus) and not (all(gpus) and sum(gpus) <= 1):
            wrong.append(
                f"learner.gpus_per_rank={gpus[0]:g} and rollout.gpus_per_worker={gpus[1]:g}: both are parts of one GPU; use 0.5 and 0.5"
            )
        if wrong:
            raise ValueError(f"rollout.colocated=true with {wrong[0]}, or leave rollout.colocated out")
        return self

    @model_validator(mode="after")
    def _require_several_updates_for_target_kl(self) -> "RunConfig":
        if self.optimizer.target_kl is not None and self.learner.updates_per_step == 1:
            raise ValueError(
                f"optimizer.target_kl={self.optimizer.target_kl:g} measures nothing where a step makes one update: the policy has not "
                "moved before it; leave it out, or raise learner.epochs or learner.mini_batches"
            )
        return self

    @property
    def max_concurrent_trajectories(self) -> int:
        """Per worker. Episodes that wait for their environment use no sequence of the engine."""
        sequences = self.rollout.max_concurrent_sequences
        return (self.episodes.max_concurrent or 2 * sequences) if self.has_episodes else sequences

    @property
    def group_deadline_s(self) -> float:
        """Deadline of a worker's next group, in whichever call: groups begin in their order, so each waits only for its own episodes. These
        may wait for processes, and begin anew when these die."""
        if not self.has_episodes:
            return self.rollout.timeout_s
        episodes, trained = self.episodes, self.buffer.trajectories_per_group + self.rollout.extra_trajectories
        size = max(trained, self.evaluation.num_samples)
        at_once = min(episodes.max_processes, self.max_concurrent_trajectories)
        rounds = _NUM_TRIES * math.ceil(size / at_once)
        return self.rollout.timeout_s + rounds * (episodes.timeout_s + episodes.cleanup_s)

    @property
    def weights_backend(self) -> Literal["gloo", "nccl"]:
        """Backend of the process groups that broadcast weights. NCCL refuses two processes on one GPU, so it needs whole GPUs."""
        if self.weights.backend != "auto":
            return self.weights.backend
        return "nccl" if self.weights_find_whole_gpus else "gloo"

    @property
    def weights_find_whole_gpus(self) -> bool:
        """Whether both sides of a broadcast have whole GPUs."""
        return self.learner.gpus_per_rank >= 1 and self.rollout.gpus_per_worker >= 1

    @property
    def broadcasts_beside_learning(self) -> bool:
        """Whether weights travel while the next step learns, from groups that may be older. Not over NCCL, whose kernels would compete with
        the learner's for the GPU; not in a deterministic run, where timing may not decide batches."""
        is_over_nccl = self.weights.transport.name == "collective" and self.weights_backend == "nccl"
        return self.buffer.max_off_policy_steps > 0 and not is_over_nccl and not self.deterministic

    @property
    def keeps_its_workers(self) -> bool:
        """Whether the fleet always is exactly its first workers: it is fixed which worker samples what, or each shares its rank's GPU."""
        return self.deterministic or self.rollout.colocated

    @property
    def published_adapter(self) -> LoraConfig | None:
        """LoRA settings of a run that sends only adapters to its workers; None where weights are sent whole."""
        lora = self.learner.lora
        return lora if lora is not None and lora.publish == "adapter" else None

    @property
    def learner_scores_reference(self) -> bool:
        """Whether the learner computes the reference log-probs with its adapters off: the reference is the base model of the adapters, and
        only log-probs of sampled tokens are needed."""
        is_base = not (self.reference.path or self.reference.by_source)
        return self.learner.lora is not None and is_base and self.algorithm.distillation is None

    @property
    def judged_per_group(self) -> int:
        """Trajectories of a group that are finished and judged."""
        num_candidates = self.rollout.extra_trajectories if self.algorithm.selection else 0
        return self.buffer.trajectories_per_group + num_candidates

    @property
    def stall_s(self) -> float:
        """Longest wait without any group starting, finishing or leaving. It catches what the deadlines of the waits within it missed."""
        judging_s = self.reward.deadline_s * max(self.judged_per_group, self.evaluation.num_samples)
        judging_s += self.reward.hold_s + 60.0
        scoring_s = self.reference.timeout_s + max(
            (each.timeout_s for each in self.reward.models.values()), default=0.0
        )
        return self.supervision.start_s + self.group_deadline_s + scoring_s + judging_s

    @model_validator(mode="after")
    def _require_recorded_experts_for_their_balance(self) -> "RunConfig":
        coefficient = self.algorithm.router_aux_loss_coefficient
        if coefficient and not self.rollout.routing_replay:
            raise ValueError(
                f"algorithm.router_aux_loss_coefficient={coefficient:g} needs the experts that the engine chose, and "
                "rollout.routing_replay=false does not record them; set that to true, or leave the coefficient out"
            )
        return self

    @model_validator(mode="after")
    def _require_candidates_for_a_selection(self) -> "RunConfig":
        if self.algorithm.selection and not self.rollout.extra_trajectories:
            raise ValueError(
                f"algorithm.selection={self.algorithm.selection.name!r} has nothing to choose from with rollout.extra_trajectories=0; "
                "set that to 1 or more, or leave the selection out"
            )
        if self.algorithm.selection and self.recorded is not None:
            raise ValueError(
                f"algorithm.selection={self.algorithm.selection.name!r} with recorded={self.recorded!r}: recorded groups train whole, and "
                "no candidates are sampled; leave the selection out"
            )
        return self

    @model_validator(mode="after")
    def _require_steps_after_the_critics_warmup(self) -> "RunConfig":
        value = self.algorithm.value
        if value is not None and value.warmup_steps >= self.num_steps:
            raise ValueError(
                f"algorithm.value.warmup_steps={value.warmup_steps} with num_steps={self.num_steps}: the policy would never train; use "
                "fewer, or raise num_steps"
            )
        return self

    @model_validator(mode="after")
    def _require_a_teacher_that_is_not_the_student(self) -> "RunConfig":
        has_teacher = self.reference.path or self.reference.by_source or self.algorithm.sft
        if self.algorithm.advantage.name == "none" and not has_teacher:
            raise ValueError(
                "algorithm.advantage='none' learns from the reference only, which is the model that the run starts from: name a teacher "
                "in reference.path, or use an advantage of the reward such as 'grpo'"
            )
        return self

    @model_validator(mode="after")
    def _forbid_truncated_sampling_in_distillation(self) -> "RunConfig":
        for name, unset in {"top_k": 0, "top_p": 1.0, "min_p": 0.0}.items():
            value = getattr(self.sampling, name)
            if self.algorithm.distillation and value != unset:
                raise ValueError(
                    f"sampling.{name}={value} with algorithm.distillation: policy and reference would each drop tokens that the other "
                    f"keeps, which makes the KL between them infinite; leave sampling.{name} out"
                )
        return self

    @model_validator(mode="after")
    def _limit_biased_tokens_on_gpus(self) -> "RunConfig":
        num_biased = len(self.sampling.logit_bias)
        if self.rollout.gpus_per_worker and num_biased > _MOST_BIASED_ON_A_GPU:
            raise ValueError(
                f"sampling.logit_bias has {num_biased:,} tokens, and vLLM takes {_MOST_BIASED_ON_A_GPU:,} on a GPU: its engines would end "
                "at their first step; name fewer"
            )
        return self

    @model_validator(mode="after")
    def _forbid_resuming_what_counts_a_completions_own_tokens(self) -> "RunConfig":
        counting = self.sampling.not_resumable()
        if self.rollout.on_update == "abort_and_resume" and counting:
            raise ValueError(
                f"sampling.{counting[0]} with rollout.on_update=abort_and_resume: the engine would apply it only to the tokens after the "
                "interruption; use rollout.on_update=continue or finish"
            )
        return self

    @model_validator(mode="after")
    def _forbid_timing_rules_in_a_deterministic_run(self) -> "RunConfig":
        timed: list[str] = []
        if self.rollout.extra_trajectories and self.algorithm.selection is None:
            timed.append(
                f"rollout.extra_trajectories={self.rollout.extra_trajectories} with deterministic=true: timing decides when the surplus is "
                "aborted, and so which sequences are computed together; set one of them to its default, or choose by algorithm.selection"
            )
        if self.buffer.max_head_of_line_s is not None:
            timed.append(
                f"buffer.max_head_of_line_s={self.buffer.max_head_of_line_s:g} with deterministic=true: timing decides which groups are "
                "dropped; set one of them to its default"
            )
        if self.deterministic and timed:
            raise ValueError("; ".join(timed))
        return self

    @model_validator(mode="after")
    def _forbid_what_is_not_compiled_exactly(self) -> "RunConfig":
        if self.learner.compile and self.deterministic:
            raise ValueError(
                "learner.compile=true with deterministic=true: the first pass decides what is compiled, and so how it rounds, "
                "and a resumed run begins with another pass; set one of them to false"
            )
        if self.learner.compile and self.rollout.routing_replay:
            raise ValueError(
                "learner.compile=true with rollout.routing_replay=true: compiled routers do not follow recorded experts; set one of them "
                "to false"
            )
        return self


def _label(environment: Plugin) -> str:
    """`guess` for `my_package.environments:guess`."""
    return environment.name.rpartition(":")[2].rpartition(".")[2]
