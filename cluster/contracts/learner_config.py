"""What learns: the model, the optimizer, the learner's ranks, and the reference model."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from cluster.contracts.settings import Layout, Mark, Mathematics, NumActors, Resources, Section


class ModelConfig(Section, mark=Mark.MATHEMATICS):
    path: str
    """A Hugging Face folder, or a hub name. The model of a checkpoint in an object store (`s3://bucket/run/checkpoints/step-000010/model`)
    may be named too: each machine downloads it once, into ~/.cache/treadwheel or what TREADWHEEL_CACHE names, and checks it."""
    revision: str | None = None
    """Hub revision; None is the default branch. Pin it for runs that must repeat."""
    dtype: Literal["auto", "float32", "bfloat16"] = "bfloat16"
    """Compute type of learner, reference and engine; master weights are float32 either way. auto is bfloat16 where the machine multiplies
    it fast (GPUs of compute capability 8 or more, processors with AMX, AMD's with AVX512-BF16) and float32 elsewhere. It is chosen before
    anything starts, on a machine that the run has to itself, and the run keeps it (docs/performance.md)."""
    max_context: PositiveInt | None = None
    """Prompt and completion together, in tokens; None takes the model's own limit."""
    chat_template: str | None = None
    """Jinja text that replaces the tokenizer's; None uses the tokenizer's, an empty text none: prompts are plain text then."""
    attention: Layout[Literal["auto", "sdpa", "eager", "flash_attention_2"]] = "auto"
    trust_remote_code: bool = False
    """Runs code from the model's repository. Off unless you name it; code from the hub needs a commit as `revision`."""

    @property
    def item_bytes(self) -> int:
        """Of one number in the compute type."""
        return 2 if self.dtype == "bfloat16" else 4


_Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section, mark=Mark.MATHEMATICS):
    """AdamW."""

    learning_rate: PositiveFloat = 1e-6
    """After the warm-up."""
    betas: tuple[_Decay, _Decay] = (0.9, 0.999)
    epsilon: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled from the gradient. Norms and biases have none."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up. Linear and cosine end at `min_learning_rate_share` at the last step."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate rises linearly to its full value."""
    min_learning_rate_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of `learning_rate` that is left at the last step."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Global L2 norm of an update's gradient; a critic with a backbone of its own is held to it by itself. None does not clip."""
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
    num_ranks: Layout[NumActors] = 1
    """Data-parallel ranks, sharded by FSDP2 when more than one."""
    sequence_parallel_size: Layout[PositiveInt] = 1
    """Neighbouring ranks that share each pass, a slice of its tokens each (Ulysses, arXiv:2309.14509): for sequences whose activations
    do not fit on one rank. It must divide `num_ranks` and the model's attention heads; so many groups of ranks are data-parallel then."""
    cpus_per_rank: Layout[PositiveFloat] = 1.0
    """Places a rank, and limits nothing. Where all actors together ask for more CPUs than there are, they share them."""
    gpus_per_rank: Layout[NonNegativeFloat] = 0.0
    num_threads: Layout[PositiveInt | None] = None
    """Torch threads of a rank; None is its CPUs, rounded up."""
    max_tokens_per_micro_batch: Layout[PositiveInt] = 16384
    """Prompt and completion tokens of a rank in one forward pass, padding included. All segments of an episode are in one pass, and must
    fit. Ranks that share a pass (`sequence_parallel_size`) have room for so many each."""
    packing: Layout[Literal["auto", "packed", "padded"]] = "auto"
    """auto packs sequences into one row where the attention implementation keeps them apart; otherwise it pads buckets of sequences
    of about the same length."""
    head_chunk_tokens: Layout[PositiveInt | None] = None
    """Completion positions whose logits are made at one time, for some thousands of tokens of the vocabulary each. None is 1,024 on CPUs
    and 16,384 on GPUs."""
    kept_logits_bytes: Resources[NonNegativeInt] = 0
    """Bytes of logits that a pass keeps for its backward pass; all of them are 4 bytes x completion tokens x vocabulary. What is not kept
    is computed again, as a fourth large product beside three. It pays on GPUs with memory to spare. A pass that has no more than 64 MiB
    of them keeps all."""
    activation_checkpointing: Layout[bool] = False
    """Computes activations again in the backward pass instead of keeping them: less memory, about a third more time."""
    compile: Layout[bool] = False
    """Compiles the decoder layers (torch.compile), which the first step waits for (docs/performance.md). On CPUs it needs a C++ compiler,
    g++ or what CXX names. Not with `deterministic`: what is compiled, and so how it rounds, follows from the pass that comes first."""
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

    @property
    def data_parallel_size(self) -> int:
        """Ranks, or groups of ranks that share their passes, that each learn from a part of the trajectories."""
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
