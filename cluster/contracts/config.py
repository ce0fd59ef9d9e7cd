"""The run's configuration: frozen, no unknown keys, every default one we vouch for, every value declared once."""

from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.plugins import Plugin
from cluster.contracts.sampling_config import EvaluationConfig, SamplingConfig
from cluster.contracts.settings import Layout, Mark, Mathematics, Resources, Section


class ModelConfig(Section, mark=Mark.MATHEMATICS):
    path: str
    """A Hugging Face folder, or a hub name."""
    revision: str | None = None
    """Hub revision; None is the default branch. Pin it for runs that must repeat."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute type of learner, reference and engine; master weights are float32 either way."""
    max_context: PositiveInt | None = None
    """Prompt and completion together, in tokens; None takes the model's own limit."""
    chat_template: str | None = None
    """Jinja text that replaces the tokenizer's; None uses the tokenizer's, an empty text none: prompts are plain text then."""
    attention: Layout[Literal["auto", "sdpa", "eager", "flash_attention_2"]] = "auto"
    trust_remote_code: bool = False
    """Runs code from the model's repository. Off unless you name it; code from the hub needs a commit as `revision`."""


class RewardConfig(Section):
    judge: Mathematics[Plugin] = Plugin(name="exact_match")
    """A name below actors.rewards, or a function of yours as 'my_package.module:name'."""
    timeout_s: Resources[PositiveFloat] = 30.0
    """Deadline of one trajectory's reward; beyond it the status is `timeout`."""
    max_concurrency: Resources[PositiveInt] = 64
    """Trajectories that are judged at the same time."""
    max_memory_bytes: Resources[PositiveInt] = 8 * 1024**3
    """What a judge's process may take, beyond which it gets a MemoryError."""
    env: Resources[tuple[str, ...]] = ()
    """Environment variables that a judge sees beside PATH, HOME, locale and threads, by name: `[OPENAI_API_KEY]`. No token reaches it
    unless it stands here."""


class BufferConfig(Section):
    groups_per_step: Mathematics[PositiveInt] = 64
    """Groups in one step."""
    trajectories_per_group: Mathematics[PositiveInt] = 8
    """Completions of one prompt."""
    max_off_policy_steps: Mathematics[NonNegativeInt] = 0
    """Learner version minus the version that sampled a token, at most. 0 is on-policy: sampling waits for the learner."""
    max_size_bytes: Layout[PositiveInt] = 2 * 1024**3
    """Limit on the trajectories that wait in the object store. A new group counts as large as the largest of the recent groups. The groups
    of the next step start even beyond the limit, or the run would stop."""
    max_head_of_line_s: Mathematics[PositiveFloat | None] = None
    """Drops stragglers. The clock runs while the learner waits for unfinished groups and enough finished groups for its step stand
    behind them. When it runs out, the unfinished groups are dropped (event `drop`, reason `straggler`), their requests are aborted, and
    other groups start in their place. This is a bias: prompts that take long are seen less often. None drops none."""
    max_dropped_steps: Resources[PositiveInt] = 20
    """The run gives up when so many steps' worth of groups were dropped in a row, by a filter or for failed rewards, and none was kept:
    nothing can be learned from such groups. As DAPO's max_num_gen_batches, which counts the batches sampled for one step."""
    max_failed_share: Mathematics[Annotated[float, Field(ge=0, le=1)]] = 0.5
    """A group with a larger share of failed rewards is dropped, and another one is sampled. In any other group the trajectories
    whose reward is known are trained on."""

    @model_validator(mode="after")
    def _require_async_for_straggler_drop(self) -> "BufferConfig":
        if self.max_head_of_line_s is not None and self.max_off_policy_steps == 0:
            raise ValueError(
                f"max_head_of_line_s={self.max_head_of_line_s:g} drops nothing with max_off_policy_steps=0: only the groups of one step "
                "start then, and none stand behind them; leave it out, or raise max_off_policy_steps to 1 or more"
            )
        return self


class OptimizerConfig(Section, mark=Mark.MATHEMATICS):
    """AdamW."""

    learning_rate: PositiveFloat = 1e-6
    """After the warm-up."""
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled from the gradient."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up. Linear and cosine end at `min_learning_rate_share` at the last step."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate rises linearly to its full value."""
    min_learning_rate_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of `learning_rate` that is left at the last step."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Global L2 norm; None does not clip."""
    target_kl: PositiveFloat | None = None
    """Learning rates, a critic's too, follow the policy's movement: each step whose last update finds a KL above twice this
    divides them by 1.5, one that finds it below half of this multiplies them by 1.5, within 1/100 and 100 of the schedule. The KL
    is that of `learner.stop_at_kl`, at its cost; after rsl_rl and skrl. None leaves the schedule alone."""


class LoraConfig(Section, mark=Mark.MATHEMATICS):
    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    publish: Layout[Literal["merged", "adapter"]] = "merged"
    """What workers receive: whole merged weights, or the adapter alone, which is small and which the engine multiplies in."""


class LearnerConfig(Section):
    num_ranks: Layout[PositiveInt] = 1
    """Data-parallel ranks, sharded by FSDP2 when more than one."""
    cpus_per_rank: Layout[PositiveFloat] = 1.0
    """Places a rank, and limits nothing. Where all actors together ask for more CPUs than there are, they share them."""
    gpus_per_rank: Layout[NonNegativeFloat] = 0.0
    num_threads: Layout[PositiveInt | None] = None
    """Torch threads of a rank; None is its CPUs, rounded up."""
    max_tokens_per_micro_batch: Layout[PositiveInt] = 16384
    """Prompt and completion tokens in one forward pass, padding included."""
    packing: Layout[Literal["auto", "packed", "padded"]] = "auto"
    """auto packs sequences into one row where the attention implementation keeps them apart; otherwise it pads buckets of sequences
    of about the same length."""
    head_chunk_tokens: Layout[PositiveInt] = 1024
    """Completion positions whose logits exist at one time."""
    activation_checkpointing: Layout[bool] = False
    """Computes activations again in the backward pass instead of keeping them: less memory, about a third more time."""
    lora: Mathematics[LoraConfig | None] = None
    epochs: Mathematics[PositiveInt] = 1
    """Times that a step trains on its trajectories. Advantages are those of the step; ratios are against the policy that
    `algorithm.proximal` names."""
    mini_batches: Mathematics[PositiveInt] = 1
    """Parts that an epoch splits the step's trajectories into, dealt anew in every epoch; each makes one optimizer update, whose
    aggregation counts its own trajectories. Fewer where failed rewards leave fewer groups than this."""
    split_by: Mathematics[Literal["groups", "trajectories"]] = "groups"
    """What is dealt to mini-batches: groups stay whole, or trajectories go one by one."""
    stop_at_kl: Mathematics[PositiveFloat | None] = None
    """An update is not made, and no later one of its step, once its KL to the policy that began the step is larger: the mean of
    ρ − 1 − log ρ over its tokens, in nats per token (0.01 to 0.05 is usual), whatever `algorithm.proximal` names. Without
    `proximal: recompute` it costs a forward pass. The first update is always made. None makes them all."""
    max_non_finite_updates: Resources[NonNegativeInt] = 3
    """An update whose loss or gradient is not finite is skipped. More skipped updates in a row than this stop the run."""
    timeout_s: Resources[PositiveFloat] = 1800.0
    """Deadline of the updates of one step."""

    @property
    def updates_per_step(self) -> int:
        """At most."""
        return self.epochs * self.mini_batches

    @model_validator(mode="after")
    def _require_several_updates(self) -> "LearnerConfig":
        if self.stop_at_kl is not None and self.updates_per_step == 1:
            raise ValueError(
                f"stop_at_kl={self.stop_at_kl:g} stops nothing where a step makes one update, which is always made; leave it out, or "
                "raise epochs or mini_batches"
            )
        if self.split_by == "trajectories" and self.mini_batches == 1:
            raise ValueError(
                "split_by='trajectories' splits nothing with mini_batches=1; leave it out, or raise mini_batches"
            )
        return self


class RolloutConfig(Section):
    num_workers: Layout[PositiveInt] = 1
    cpus_per_worker: Layout[PositiveFloat] = 1.0
    """Places a worker, as `learner.cpus_per_rank` places a rank. A worker that joins a run whose actors share CPUs shares them too, unless
    the run is elastic: then it waits for a node."""
    gpus_per_worker: Layout[NonNegativeFloat] = 0.0
    num_threads: Layout[PositiveInt | None] = None
    """OpenMP threads of a worker's engine; None is its CPUs, rounded up."""
    tensor_parallel_size: Layout[PositiveInt] = 1
    max_concurrent_sequences: Layout[PositiveInt] = 256
    """Sequences in one engine step."""
    kv_cache_bytes: Layout[PositiveInt | None] = None
    """Key-value cache of a CPU engine; None is 1 GiB. A GPU engine uses gpu_memory_utilization."""
    gpu_memory_utilization: Layout[Annotated[float, Field(gt=0, le=1)]] = 0.85
    """Share of a GPU's memory that its engine takes, weights and cache together."""
    enforce_eager: Layout[bool] = True
    """True starts in seconds; False compiles first and samples faster on long runs."""
    head_dtype: Layout[Literal["auto", "model", "float32"]] = "auto"
    """Type in which the engine computes logits. The learner's are float32; a head in bfloat16 rounds them, which is most of what engine
    and learner differ by. auto is float32 on GPUs, where it costs nothing, and the model's own on CPUs, where a head of a large
    vocabulary in float32 halves the speed of sampling."""
    prefix_caching: Layout[bool] = True
    """Keys and values of a common beginning are computed once."""
    on_update: Layout[Literal["continue", "finish", "abort_and_resume"]] = "continue"
    """What running requests do when new weights come. `continue`: they wait while the weights are loaded between two engine steps, and
    go on. `finish`: they end first. `abort_and_resume`: they stop and go on as partial rollouts; keys and values of the tokens so far are
    computed again under the new weights."""
    extra_trajectories: Mathematics[NonNegativeInt] = 0
    """Over-sampling inside a group: so many trajectories are started beyond buffer.trajectories_per_group. With `algorithm.selection` all
    are judged, and it chooses the group by their rewards. Without it the first ones to end make the group, and the others are aborted:
    short completions are favoured, a bias that no ratio corrects, which is why it is off by default. Those left out leave no row. After
    APRIL (arXiv:2509.18521), which resumes later what it aborted, and PODS (arXiv:2504.13818), which chooses."""
    timeout_s: Resources[PositiveFloat] = 600.0
    """Deadline of one group, and of an engine that makes no progress."""


class ReferenceConfig(Section):
    cpus: Layout[PositiveFloat] = 0.5
    gpus: Layout[NonNegativeFloat] = 0.0
    num_threads: Layout[PositiveInt | None] = None
    path: Mathematics[str | None] = None
    """Model that the KL pulls towards, or that teaches (`preset: on_policy_distillation`); None is the model the run starts from. It must
    have the policy's vocabulary."""
    by_source: Mathematics[dict[str, str]] = Field(default={})
    """Other models for some prompts, `{math: path, code: path}`: for those whose `source_column` says so. `path` is for all others. Each
    is loaded beside it, from its hub's default branch, and may bring no code."""
    source_column: Mathematics[str] = "source"
    """The prompt's column that `by_source` goes by."""
    revision: Mathematics[str | None] = None
    """Hub revision of `path`; None is the default branch."""
    trust_remote_code: Mathematics[bool] = False
    """As `model.trust_remote_code`, for `path`."""
    max_tokens_per_micro_batch: Layout[PositiveInt] = 16384
    """Prompt and completion tokens in one forward pass, padding included."""
    timeout_s: Resources[PositiveFloat] = 600.0

    @model_validator(mode="after")
    def _require_a_path_for_revision_and_code(self) -> "ReferenceConfig":
        for name in ("revision", "trust_remote_code"):
            if self.path is None and getattr(self, name):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} without path: the reference is the model the run starts from, and is loaded as "
                    f"that one is; set path, or leave {name} out"
                )
        return self


class WeightsConfig(Section):
    transport: Resources[Plugin] = Plugin(name="object_store")
    bucket_bytes: Resources[PositiveInt] = 256 * 1024**2
    """Weights travel in buckets of at most this size (one tensor at least)."""
    canary_tokens: Resources[Annotated[int, Field(ge=2)]] = 64
    """Length of the probe whose log-probs engine and learner must agree on: bos, then the run's own first prompts."""
    canary_tolerance: Resources[PositiveFloat | None] = None
    """Largest mean absolute difference, in nats. None measures it: three times what engine and learner differ by under the files
    that both start from, which may be 0.001 at most in float32 and 0.2 in bfloat16."""
    repair_tied_head: Mathematics[bool] = True
    """vLLM on CPU keeps the old vocabulary head of tied models after a reload; this packs it again. Off only to see the canary catch it."""
    timeout_s: Resources[PositiveFloat] = 600.0


class CheckpointConfig(Section, mark=Mark.RESOURCES):
    every_steps: PositiveInt | None = 20
    """A learner that dies learns so many steps again, at most. None does not save by steps. The last step is always saved."""
    every_s: PositiveFloat | None = 600.0
    """Also saves when the last save is so long ago, for runs whose steps take long. None does not save by time."""
    stop_timeout_s: NonNegativeFloat = 60.0
    """Longest that a run which is stopped (Ctrl-C, SIGTERM) takes to finish its step and save it; 0 saves nothing then."""
    keep_last: PositiveInt = 2
    """Checkpoints that stay."""
    keep_best: bool = True
    """Also keeps the checkpoint with the best evaluation, or with the best reward in a run that does not evaluate."""
    asynchronous: bool = True
    """Copies the state, and writes it while training goes on."""


class SupervisionConfig(Section, mark=Mark.RESOURCES):
    max_restarts: NonNegativeInt = 8
    """Restarts of one actor within `window_s`, beyond which the run stops. The learner's ranks count as one actor, and so do all ranks
    that die with one node."""
    window_s: PositiveFloat = 600.0
    backoff_s: NonNegativeFloat = 1.0
    """Wait before a restart. It doubles with each restart in the window."""
    heartbeat_s: PositiveFloat = 5.0
    """How often actors are asked what they do."""
    hang_s: PositiveFloat = 60.0
    """An actor that does not answer for so long is killed and replaced. An actor that answers but makes no progress is found by the
    deadline of the call that it works on (`timeout_s` of its section)."""
    start_s: PositiveFloat = 300.0
    """Deadline for an actor to come up, model loading included."""
    max_prompt_failures: PositiveInt = 3
    """A prompt whose groups failed so often is not sampled again."""


class MismatchConfig(Section, mark=Mark.RESOURCES):
    """Limits on |learner log-prob - rollout log-prob|, averaged over a step's newest tokens: those that the current weights sampled, or
    where a late asynchronous step has none of them, the newest weights that sampled any."""

    alarm_nats: PositiveFloat = 0.5
    """A larger difference is logged as event `mismatch_alarm`."""
    stop_nats: PositiveFloat | None = None
    """A larger difference stops the run, with the name of the step's trajectories. None never stops."""


class ElasticConfig(Section, mark=Mark.LAYOUT):
    min_workers: PositiveInt = 1
    max_workers: PositiveInt | None = None
    """None does not scale by itself."""
    scale_up_wait_share: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Workers are added while the learner waits for groups for a larger share of its time."""
    scale_down_full_steps: PositiveInt = 10
    """One worker is removed after so many steps in a row with a full buffer."""


class RecordConfig(Section, mark=Mark.RESOURCES):
    keep_trajectories: PositiveInt | None = None
    """Steps whose trajectories stay in the run directory; None keeps all. Those of all steps since the oldest of the last
    `checkpoint.keep_last` checkpoints stay in any case: a restart may learn them again. A replay needs all of them."""


class MetricsConfig(Section, mark=Mark.RESOURCES):
    """Where the numbers of each step go. Events always go to events.jsonl too."""

    sinks: tuple[Plugin, ...] = (Plugin(name="console"), Plugin(name="jsonl"), Plugin(name="tensorboard"))


class RunConfig(Section):
    """One run. The README's quickstart is deploy/runs/quickstart.yaml."""

    run_dir: Resources[str] = "runs/run"
    """Local path; on several nodes, one that all of them mount. Checkpoints cannot lie in an object store yet, so training refuses
    one."""
    seed: Mathematics[NonNegativeInt] = 0
    """Of the order of prompts and of all sampling."""
    num_steps: Resources[PositiveInt] = 100
    """A step takes `buffer.groups_per_step` groups, makes the optimizer updates of `learner.epochs` and `learner.mini_batches`, and ends
    with a new policy version."""
    deterministic: Mathematics[bool] = False
    """A CPU run repeats bit for bit: fixed batch compositions, one thread order, seeds by prompt and sample."""
    model: ModelConfig
    prompts: Mathematics[Plugin]
    """A name below actors.prompts: `reasoning_gym`, `file`, ... with its parameters. Texts of a file go through the model's chat
    template where it has one; `text_as: text` sends them as they are, `text_as: user_message` asks for the template."""
    recorded: Mathematics[str | None] = None
    """Run directory, folder of .arrow files, or one file, to learn from instead of sampling: `treadwheel learn` sets it. The log-probs in
    it are another policy's, of any age: `buffer.max_off_policy_steps` bounds nothing, `algorithm.corrections` weigh the gap."""
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
        if smallest < self.learner.num_ranks:
            raise ValueError(
                f"learner.num_ranks={self.learner.num_ranks} is more than the {smallest} trajectories of an update; "
                "use fewer ranks or learner.mini_batches, or raise buffer.groups_per_step or buffer.trajectories_per_group"
            )
        return self

    @model_validator(mode="after")
    def _require_several_updates_for_target_kl(self) -> "RunConfig":
        if self.optimizer.target_kl is not None and self.learner.updates_per_step == 1:
            raise ValueError(
                f"optimizer.target_kl={self.optimizer.target_kl:g} measures nothing where a step makes one update, before which the "
                "policy has not moved; leave it out, or raise learner.epochs or learner.mini_batches"
            )
        return self

    @property
    def judged_per_group(self) -> int:
        """Trajectories of a group that are finished and judged."""
        num_candidates = self.rollout.extra_trajectories if self.algorithm.selection else 0
        return self.buffer.trajectories_per_group + num_candidates

    @model_validator(mode="after")
    def _require_candidates_for_a_selection(self) -> "RunConfig":
        if self.algorithm.selection and not self.rollout.extra_trajectories:
            raise ValueError(
                f"algorithm.selection={self.algorithm.selection.name!r} has nothing to choose from with rollout.extra_trajectories=0; "
                "set that to 1 or more, or leave the selection out"
            )
        if self.algorithm.selection and self.recorded is not None:
            raise ValueError(
                f"algorithm.selection={self.algorithm.selection.name!r} with recorded={self.recorded!r}: recorded groups are trained on "
                "whole, and nothing is sampled to choose from; leave the selection out"
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
                "algorithm.advantage='none' learns from the reference, which is the model that the run starts from: name a teacher "
                "in reference.path, or use an advantage of the reward such as 'grpo'"
            )
        return self

    @model_validator(mode="after")
    def _forbid_resuming_what_counts_a_completions_own_tokens(self) -> "RunConfig":
        """A resumed request's first tokens are prompt to the engine."""
        harmless = ("min_tokens", "repetition_penalty", "logit_bias")
        counting = [name for name in self.sampling.biased() if name not in harmless]
        if self.rollout.on_update == "abort_and_resume" and counting:
            raise ValueError(
                f"sampling.{counting[0]} with rollout.on_update=abort_and_resume: the engine would apply it to the tokens after the "
                "interruption alone; use rollout.on_update=continue or finish"
            )
        return self

    @model_validator(mode="after")
    def _forbid_timing_rules_in_a_deterministic_run(self) -> "RunConfig":
        timed: list[str] = []
        if self.rollout.extra_trajectories and self.algorithm.selection is None:
            timed.append(
                f"rollout.extra_trajectories={self.rollout.extra_trajectories} with deterministic=true: when the surplus is aborted "
                "depends on timing, and with it what is computed together; set one of them to its default, or choose by algorithm.selection"
            )
        if self.buffer.max_head_of_line_s is not None:
            timed.append(
                f"buffer.max_head_of_line_s={self.buffer.max_head_of_line_s:g} with deterministic=true: which groups are dropped "
                "depends on timing; set one of them to its default"
            )
        if self.deterministic and timed:
            raise ValueError("; ".join(timed))
        return self
