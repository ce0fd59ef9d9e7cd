"""Settings of the model, the optimizer, the learner's ranks, and the reference model."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from cluster.contracts.settings import Layout, Mark, Mathematics, NumActors, Resources, Section


class ModelConfig(Section, mark=Mark.MATHEMATICS):
    path: str
    """A Hugging Face folder, or a hub name. The model of a checkpoint in an object store (`s3://bucket/run/checkpoints/step-000010/model`)
    may be named too: each machine downloads it once, into ~/.cache/treadwheel or TREADWHEEL_CACHE, and verifies it."""
    revision: str | None = None
    """Hub revision; None is the default branch. Pin it for runs that must repeat."""
    dtype: Literal["auto", "float32", "bfloat16"] = "bfloat16"
    """Compute type of learner, reference and engine; master weights are always float32. auto is bfloat16 where the machine multiplies it
    fast (GPUs of compute capability 8 or more, processors with AMX, AMD's with AVX512-BF16) and float32 elsewhere. It is chosen before
    anything starts, on a machine that runs nothing else, and the run keeps it (docs/performance.md)."""
    max_context: PositiveInt | None = None
    """Limit of prompt and completion together, in tokens; None takes the model's own limit."""
    chat_template: str | None = None
    """Jinja text that replaces the tokenizer's chat template. None keeps the tokenizer's. With an empty text prompts are plain text."""
    attention: Layout[Literal["auto", "sdpa", "eager", "flash_attention_2"]] = "auto"
    trust_remote_code: bool = False
    """Runs code from the model's repository. For code from the hub, `revision` must be a commit."""

    @property
    def item_bytes(self) -> int:
        """Bytes of one number in the compute type."""
        return 2 if self.dtype == "bfloat16" else 4


_Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section, mark=Mark.MATHEMATICS):
    """Settings of AdamW."""

    learning_rate: PositiveFloat = 1e-6
    """Learning rate after the warm-up."""
    betas: tuple[_Decay, _Decay] = (0.9, 0.999)
    """Decay rates of the means of gradients and of squared gradients."""
    epsilon: PositiveFloat = 1e-8
    """Added to the square root of the mean squared gradient, by which an update is divided."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled from the gradient. Norms and biases have no decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up. `linear` and `cosine` reach `min_learning_rate_share` at the last step."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate rises linearly to its full value."""
    min_learning_rate_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of `learning_rate` at the last step."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Clips the global L2 norm of an update's gradient; a critic with its own backbone is clipped separately. None does not clip."""
    target_kl: PositiveFloat | None = None
    """Adapts the learning rates of policy and critic to the policy's change. When the last update of a step finds a KL above twice this
    value, they are divided by 1.5; below half of it, multiplied by 1.5, within 1/100 and 100 times the schedule. The KL is that of
    `learner.stop_at_kl` and costs the same; after rsl_rl and skrl. None keeps the schedule."""


class LoraConfig(Section, mark=Mark.MATHEMATICS):
    rank: PositiveInt = 16
    """Rank of the two matrices of each adapter."""
    alpha: PositiveFloat = 32.0
    """An adapter's output is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that a training pass sets to 0."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    publish: Layout[Literal["merged", "adapter"]] = "merged"
    """The weights that workers receive: the whole merged model, or only the adapter, which is small and which the engine applies. With
    bfloat16, `merged` rounds small changes away (docs/lora.md)."""


class LearnerConfig(Section):
    num_ranks: Layout[NumActors] = 1
    """Number of data-parallel ranks, sharded by FSDP2 if more than one."""
    sequence_parallel_size: Layout[PositiveInt] = 1
    """Number of neighbouring ranks that share each pass, each with a slice of its tokens (Ulysses, arXiv:2309.14509), for sequences whose
    activations do not fit on one rank. It must divide `num_ranks` and the number of the model's attention heads. Data parallelism is then
    between these groups of ranks."""
    cpus_per_rank: Layout[PositiveFloat] = 1.0
    """CPUs reserved to place a rank; they do not limit it. If all actors ask for more CPUs than exist, they share them."""
    gpus_per_rank: Layout[NonNegativeFloat] = 0.0
    """GPUs of each rank. A single rank may take a share of a GPU."""
    num_threads: Layout[PositiveInt | None] = None
    """Torch threads of a rank; None is its CPUs, rounded up."""
    max_tokens_per_micro_batch: Layout[PositiveInt] = 16384
    """Prompt and completion tokens of a rank in one forward pass, padding included. A longer trajectory has its own pass, but all segments
    of an episode go through one pass and must fit. With `sequence_parallel_size`, each rank that shares a pass adds this many."""
    packing: Layout[Literal["auto", "packed", "padded"]] = "auto"
    """auto packs sequences into one row if the attention implementation keeps them apart. Otherwise it pads groups of sequences of
    similar length."""
    head_chunk_tokens: Layout[PositiveInt | None] = None
    """Completion positions whose logits are computed at once, for some thousands of the vocabulary's tokens at a time. None is 1,024 on
    CPUs and 16,384 on GPUs."""
    kept_logits_bytes: Resources[NonNegativeInt] = 0
    """Bytes of logits that a pass keeps for its backward pass; all of them are 4 bytes x completion tokens x vocabulary. The others are
    computed again, which is a fourth large matrix product in addition to three. Useful with free memory. A pass with at most 64 MiB
    keeps all."""
    activation_checkpointing: Layout[bool] = False
    """Computes activations again in the backward pass instead of keeping them: less memory, about a third more time."""
    compile: Layout[bool] = False
    """Compiles the decoder layers (torch.compile) in the first step, which takes longer (docs/performance.md). CPUs need a C++ compiler:
    g++ or the one that CXX names. Not with `deterministic`: the first pass decides what is compiled, and so how it rounds."""
    lora: Mathematics[LoraConfig | None] = None
    epochs: Mathematics[PositiveInt] = 1
    """Number of times that a step trains on its trajectories. Advantages are computed once a step; ratios are relative to the policy that
    `algorithm.proximal` selects."""
    mini_batches: Mathematics[PositiveInt] = 1
    """Number of parts into which every epoch splits the step's trajectories, shuffled anew each time. Each part makes one optimizer update,
    whose aggregation counts only its own trajectories. There are fewer parts when failed rewards leave fewer groups than this."""
    split_by: Mathematics[Literal["groups", "trajectories"]] = "groups"
    """Unit that is distributed to mini-batches: whole groups, or single trajectories."""
    stop_at_kl: Mathematics[PositiveFloat | None] = None
    """Ends a step before the first update whose KL to the policy at the step's start exceeds this: the mean of ρ − 1 − log ρ over the
    update's tokens, in nats per token (usually 0.01 to 0.05), for every `algorithm.proximal`. The first update is always made. Costs a
    forward pass without `proximal: recompute`. None makes all updates."""
    max_non_finite_updates: Resources[NonNegativeInt] = 3
    """An update whose loss or gradient is not finite is skipped. More consecutive skipped updates than this stop the run."""
    timeout_s: Resources[PositiveFloat] = 1800.0
    """Deadline for the updates of one step. Also the longest time that ranks wait for each other, in a step or in a save that is not in the
    background."""

    @property
    def updates_per_step(self) -> int:
        """Upper limit: a step may make fewer."""
        return self.epochs * self.mini_batches

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks, or of groups of ranks that share their passes, that each learn from a part of the trajectories."""
        return self.num_ranks // self.sequence_parallel_size

    @model_validator(mode="after")
    def _require_whole_groups_of_packed_ranks(self) -> "LearnerConfig":
        if self.num_ranks % self.sequence_parallel_size:
            raise ValueError(
                f"sequence_parallel_size={self.sequence_parallel_size} does not divide num_ranks={self.num_ranks}; use a divisor, or "
                "raise num_ranks to a multiple of it"
            )
        if self.sequence_parallel_size > 1 and self.packing == "padded":
            raise ValueError(
                f"sequence_parallel_size={self.sequence_parallel_size} splits packed rows, and packing='padded' makes none; "
                "use packing=auto"
            )
        return self

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


class ReferenceConfig(Section):
    cpus: Layout[PositiveFloat] = 0.5
    """As `learner.cpus_per_rank`."""
    gpus: Layout[NonNegativeFloat] = 0.0
    """GPUs of each scorer, or a share of one."""
    num_threads: Layout[PositiveInt | None] = None
    """Torch threads; None is the number of `cpus`, rounded up."""
    path: Mathematics[str | None] = None
    """Model that the KL refers to, or the teacher (`preset: on_policy_distillation`), with the policy's vocabulary. None is the run's
    starting model."""
    by_source: Mathematics[dict[str, str]] = Field(default={})
    """Models for the prompts of some sources, by the value of `source_column`: `{math: path, code: path}`. `path` is for all other prompts.
    Each model is loaded in addition, from the default branch of its hub repository and without code of its own."""
    source_column: Mathematics[str] = "source"
    """The prompt's column with the keys of `by_source`."""
    revision: Mathematics[str | None] = None
    """Hub revision of `path`; None is the default branch."""
    trust_remote_code: Mathematics[bool] = False
    """As `model.trust_remote_code`, for `path`."""
    max_tokens_per_micro_batch: Layout[PositiveInt] = 16384
    """Prompt and completion tokens in one forward pass, padding included."""
    timeout_s: Resources[PositiveFloat] = 600.0
    """Deadline for the scores of one group. A scorer that misses it is restarted."""

    @model_validator(mode="after")
    def _require_a_path_for_revision_and_code(self) -> "ReferenceConfig":
        for name in ("revision", "trust_remote_code"):
            if self.path is None and getattr(self, name):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} without path: the reference is the model the run starts from, and is loaded as "
                    f"that one is; set path, or leave {name} out"
                )
        return self
