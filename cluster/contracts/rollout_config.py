"""Settings of sampling: the groups of a step, the workers, and how new weights reach them."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from cluster.contracts.plugins import Plugin
from cluster.contracts.settings import Layout, Mathematics, NumActors, Resources, Section


class BufferConfig(Section):
    groups_per_step: Mathematics[PositiveInt] = 64
    """Groups in one step."""
    trajectories_per_group: Mathematics[PositiveInt] = 8
    """Trajectories of one prompt."""
    max_off_policy_steps: Mathematics[NonNegativeInt] = 0
    """Maximum staleness: the learner's version minus the version that sampled a token. 0 is on-policy: sampling waits for the learner."""
    max_size_bytes: Layout[PositiveInt] = 2 * 1024**3
    """Limit on the trajectories that wait in the object store. The size of a new group is estimated as that of the largest recent group.
    The groups of the next step start even beyond the limit; otherwise the run would stop."""
    max_head_of_line_s: Mathematics[PositiveFloat | None] = None
    """Drops stragglers. The clock runs while the learner waits for unfinished groups although enough other groups for a step are
    finished. When the time is up, the unfinished groups are dropped (event `drop`, reason `straggler`), their requests are aborted, and
    other groups start in their place. This is a bias: slow prompts train less often. None drops no stragglers."""
    max_dropped_steps: Resources[PositiveInt] = 20
    """The run stops when this many steps' worth of groups were dropped in a row, because of a filter, failed rewards or a refusal of the
    engine: nothing can be learned from such groups. Like DAPO's max_num_gen_batches, which counts the batches sampled for one step."""
    max_failed_share: Mathematics[Annotated[float, Field(ge=0, le=1)]] = 0.5
    """A group with a larger share of failed rewards is replaced by another. In every other group all trajectories with a known reward
    train."""

    @property
    def most_under_way(self) -> int:
        """Maximum number of groups under way at once within the staleness bound."""
        return self.groups_per_step * (self.max_off_policy_steps + 1)

    @model_validator(mode="after")
    def _require_async_for_straggler_drop(self) -> "BufferConfig":
        if self.max_head_of_line_s is not None and self.max_off_policy_steps == 0:
            raise ValueError(
                f"max_head_of_line_s={self.max_head_of_line_s:g} drops nothing with max_off_policy_steps=0, where only the groups of one "
                "step start and no later group can finish first; leave it out, or raise max_off_policy_steps to 1 or more"
            )
        return self


class RolloutConfig(Section):
    num_workers: Layout[NumActors] = 1
    """Number of rollout workers, each with an engine. `elastic` and `treadwheel scale` change it during the run."""
    cpus_per_worker: Layout[PositiveFloat] = 1.0
    """CPUs that Ray reserves to place a worker, as `learner.cpus_per_rank`. A worker that joins a run whose actors share CPUs shares them
    too; in an elastic run it waits for a node instead."""
    gpus_per_worker: Layout[NonNegativeFloat] = 0.0
    """GPUs of each worker, or a share of one."""
    colocated: Layout[bool] = False
    """Each worker shares the GPU of the learner rank with its number, and they use it in turn. The engines sleep while the learner learns;
    the ranks keep their state in host memory while the engines sample. For synchronous runs: no GPU waits (docs/gpus.md)."""
    num_threads: Layout[PositiveInt | None] = None
    """OpenMP threads of a worker's engine; None is its CPUs, rounded up. The processes of one engine share them, at least one each."""
    tensor_parallel_size: Layout[PositiveInt] = 1
    """Processes of one engine, each with a share of every layer and of the cache: on GPUs one for each of gpus_per_worker, on CPUs all on
    the worker's cores. It must divide the number of the model's attention heads."""
    max_concurrent_sequences: Layout[PositiveInt] = 256
    """Maximum number of sequences in one engine step."""
    kv_cache_bytes: Layout[PositiveInt | None] = None
    """Size of a CPU engine's key-value cache, over all its processes; None is 1 GiB. A GPU engine uses gpu_memory_utilization."""
    gpu_memory_utilization: Layout[Annotated[float, Field(gt=0, le=1)]] = 0.85
    """Share of a GPU's memory that its engine uses for weights and cache together."""
    enforce_eager: Layout[bool] = True
    """True starts in seconds. False compiles first and samples faster, for long runs."""
    head_dtype: Layout[Literal["auto", "model", "float32"]] = "auto"
    """Compute type of the engine's logits. The learner's are float32. A bfloat16 head rounds them, which is the largest part of the
    difference between engine and learner. auto is float32 on GPUs, where it costs nothing, and the model's type on CPUs, where float32
    halves the sampling speed of a model with a large vocabulary."""
    quantization: Mathematics[
        Literal["fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "int8_per_channel"] | None
    ] = None
    """Scheme for 8-bit linear layers in the engine: weights are rounded whenever they arrive, inputs in each pass. The learner is not
    quantized, so another policy samples than the one that learns: `mismatch/mean_abs_nats` measures the gap, `algorithm.corrections` weigh
    it. None does not quantize. Needs `model.dtype: bfloat16`; on CPUs int8_per_channel or fp8_per_channel; for FP8 on GPUs compute
    capability 8.9."""
    prefix_caching: Layout[bool] = True
    """Computes keys and values of a common prefix only once."""
    on_update: Layout[Literal["continue", "finish", "abort_and_resume"]] = "continue"
    """Treatment of running requests when new weights arrive. `continue`: they pause between two engine steps while the weights load, and
    continue. `finish`: they finish first. `abort_and_resume`: they stop and resume as partial rollouts; keys and values of their tokens are
    computed again under the new weights."""
    routing_replay: Mathematics[bool] = False
    """For a mixture of experts: the engine returns the experts that it chose, and the learner uses them instead of its own routers' choice.
    Their weights still come from the learner's routers, with gradients. Otherwise rounding makes engine and learner choose different
    experts, which is most of the mismatch of such models. Rollout routing replay, R3 (arXiv:2510.11370). A trajectory grows by one byte per
    position, layer and expert per token (two bytes above 256 experts)."""
    extra_trajectories: Mathematics[NonNegativeInt] = 0
    """Number of trajectories that a group starts in addition to buffer.trajectories_per_group. With `algorithm.selection` all are judged,
    and the selection chooses by reward. Otherwise the first to finish form the group, and the rest are aborted. That favours short
    completions, a bias that no ratio corrects, so it is off by default. Trajectories that are left out leave no row. After APRIL
    (arXiv:2509.18521), which later resumes what it aborted, and PODS (arXiv:2504.13818), which selects."""
    timeout_s: Resources[PositiveFloat] = 600.0
    """Deadline of one group, and of an engine that makes no progress."""

    @property
    def cpu_cache_bytes(self) -> int:
        """Size of the key-value cache of an engine on CPUs."""
        return self.kv_cache_bytes or 1024**3

    @property
    def cpu_cache_bytes_per_process(self) -> int:
        """Each process caches the keys and values of its own heads."""
        return self.cpu_cache_bytes // self.tensor_parallel_size

    @model_validator(mode="after")
    def _require_an_engine_that_returns_experts(self) -> "RolloutConfig":
        if self.routing_replay and not self.prefix_caching:
            raise ValueError(
                "routing_replay=true needs prefix_caching=true: the engine keeps the experts of a position with its keys and values"
            )
        if self.routing_replay and not self.enforce_eager and not self.gpus_per_worker:
            raise ValueError(
                "routing_replay=true needs enforce_eager=true on CPUs: an engine compiled for them does not return its experts"
            )
        return self


class WeightsConfig(Section):
    transport: Resources[Plugin] = Plugin(name="object_store")
    backend: Resources[Literal["auto", "gloo", "nccl"]] = "auto"
    """Backend of the process groups of `weights.transport=collective`. auto is nccl if the learner's ranks and the engines have whole GPUs,
    and otherwise gloo, through the memory of the hosts."""
    bucket_bytes: Resources[PositiveInt] = 256 * 1024**2
    """Largest size of the buckets in which weights travel. A bucket holds at least one tensor."""
    deltas: Resources[bool] = False
    """Workers that serve the previous version receive only the changes, if these have at most half of the bytes. For whole models in
    bfloat16. The learner's first rank and every worker keep a copy of the weights for it."""
    canary_tokens: Resources[Annotated[int, Field(ge=2)]] = 64
    """Length of the canary, on whose log-probs engine and learner must agree: bos, then the run's own first prompts."""
    canary_tolerance: Resources[PositiveFloat | None] = None
    """Largest mean absolute difference on the canary, in nats. None measures it: three times the difference under the files from which
    engine and learner both start, which may be at most 0.001 in float32, 0.2 in bfloat16, and 0.5 with rollout.quantization."""
    repair_tied_head: Mathematics[bool] = True
    """vLLM on CPUs keeps the old vocabulary head of tied models after a reload; this packs it again. Off only to see the canary catch
    it."""
    timeout_s: Resources[PositiveFloat] = 600.0
    """Deadline for the learner's publication, and for each worker's transfer, load and proof of the weights."""
