"""What samples: the groups of a step, the workers, and how new weights reach them."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from cluster.contracts.plugins import Plugin
from cluster.contracts.settings import Layout, Mathematics, NumActors, Resources, Section


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
    """The run gives up when so many steps' worth of groups were dropped in a row, by a filter, for failed rewards or since the engine
    refused them, and none was kept: nothing can be learned from such groups. As DAPO's max_num_gen_batches, which counts the batches
    sampled for one step."""
    max_failed_share: Mathematics[Annotated[float, Field(ge=0, le=1)]] = 0.5
    """A group with a larger share of failed rewards is dropped, and another one is sampled. In any other group the trajectories
    whose reward is known are trained on."""

    @property
    def most_under_way(self) -> int:
        """Groups that may be under way at once, inside the staleness bound."""
        return self.groups_per_step * (self.max_off_policy_steps + 1)

    @model_validator(mode="after")
    def _require_async_for_straggler_drop(self) -> "BufferConfig":
        if self.max_head_of_line_s is not None and self.max_off_policy_steps == 0:
            raise ValueError(
                f"max_head_of_line_s={self.max_head_of_line_s:g} drops nothing with max_off_policy_steps=0: only the groups of one step "
                "start then, and none stand behind them; leave it out, or raise max_off_policy_steps to 1 or more"
            )
        return self


class RolloutConfig(Section):
    num_workers: Layout[NumActors] = 1
    cpus_per_worker: Layout[PositiveFloat] = 1.0
    """Places a worker, as `learner.cpus_per_rank` places a rank. A worker that joins a run whose actors share CPUs shares them too, unless
    the run is elastic: then it waits for a node."""
    gpus_per_worker: Layout[NonNegativeFloat] = 0.0
    colocated: Layout[bool] = False
    """Each worker shares the GPU of the learner's rank of its number, and they have it in turn: engines sleep while the learner learns, and
    its ranks keep their state in the host's memory while engines sample. For synchronous runs: no GPU waits for the other side
    (docs/gpus.md)."""
    num_threads: Layout[PositiveInt | None] = None
    """OpenMP threads of a worker's engine; None is its CPUs, rounded up. Processes of one engine share them, and have one each at least."""
    tensor_parallel_size: Layout[PositiveInt] = 1
    """Processes of one engine, each with a share of every layer and of the cache: on GPUs one for each of gpus_per_worker, on CPUs as
    many on the worker's cores. It must divide the model's attention heads."""
    max_concurrent_sequences: Layout[PositiveInt] = 256
    """Sequences in one engine step."""
    kv_cache_bytes: Layout[PositiveInt | None] = None
    """Key-value cache of a CPU engine, all its processes together; None is 1 GiB. A GPU engine uses gpu_memory_utilization."""
    gpu_memory_utilization: Layout[Annotated[float, Field(gt=0, le=1)]] = 0.85
    """Share of a GPU's memory that its engine takes, weights and cache together."""
    enforce_eager: Layout[bool] = True
    """True starts in seconds; False compiles first and samples faster on long runs."""
    head_dtype: Layout[Literal["auto", "model", "float32"]] = "auto"
    """Type in which the engine computes logits. The learner's are float32; a head in bfloat16 rounds them, which is most of what engine
    and learner differ by. auto is float32 on GPUs, where it costs nothing, and the model's own on CPUs, where a head of a large
    vocabulary in float32 halves the speed of sampling."""
    quantization: Mathematics[
        Literal["fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "int8_per_channel"] | None
    ] = None
    """The engine's linear layers in 8 bits, by a scheme of this name: weights are rounded from the learner's type whenever they arrive,
    inputs as they pass. The learner stays as it is, so that tokens come from another policy than the one that learns:
    `mismatch/mean_abs_nats` measures the gap, `algorithm.corrections` weigh it. None rounds nothing. It needs
    `model.dtype: bfloat16`, on CPUs int8_per_channel or fp8_per_channel, and for FP8 on GPUs compute capability 8.9."""
    prefix_caching: Layout[bool] = True
    """Keys and values of a common beginning are computed once."""
    on_update: Layout[Literal["continue", "finish", "abort_and_resume"]] = "continue"
    """What running requests do when new weights come. `continue`: they wait while the weights are loaded between two engine steps, and
    go on. `finish`: they end first. `abort_and_resume`: they stop and go on as partial rollouts; keys and values of the tokens so far are
    computed again under the new weights."""
    routing_replay: Mathematics[bool] = False
    """Of a mixture of experts: the engine returns the experts that it chose, and the learner computes with these, not with those that its
    own routers would choose; how much each counts is still its routers' own, with gradients. Rounding flips choices between engine and
    learner, which is most of the mismatch of such models. Rollout routing replay, R3 (arXiv:2510.11370). A trajectory grows by a byte per
    position, layer and expert of a token (two above 256 experts)."""
    extra_trajectories: Mathematics[NonNegativeInt] = 0
    """Over-sampling inside a group: so many trajectories are started beyond buffer.trajectories_per_group. With `algorithm.selection` all
    are judged, and it chooses the group by their rewards. Without it the first ones to end make the group, and the others are aborted:
    short completions are favoured, a bias that no ratio corrects, which is why it is off by default. Those left out leave no row. After
    APRIL (arXiv:2509.18521), which resumes later what it aborted, and PODS (arXiv:2504.13818), which chooses."""
    timeout_s: Resources[PositiveFloat] = 600.0
    """Deadline of one group, and of an engine that makes no progress."""

    @property
    def cpu_cache_bytes(self) -> int:
        """Of the key-value cache of an engine on CPUs."""
        return self.kv_cache_bytes or 1024**3

    @property
    def cpu_cache_bytes_per_process(self) -> int:
        """Each has the keys and values of its own heads."""
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
    """Of the process groups of `weights.transport=collective`. auto is nccl where the learner's ranks and the engines have whole GPUs, and
    gloo, through the hosts' memory, elsewhere."""
    bucket_bytes: Resources[PositiveInt] = 256 * 1024**2
    """Weights travel in buckets of at most this size (one tensor at least)."""
    deltas: Resources[bool] = False
    """Workers that serve the version before get what changed since it, where that is at most half of the whole. For whole models in
    bfloat16. The learner's first rank and every worker keep a copy of the weights for it."""
    canary_tokens: Resources[Annotated[int, Field(ge=2)]] = 64
    """Length of the probe whose log-probs engine and learner must agree on: bos, then the run's own first prompts."""
    canary_tolerance: Resources[PositiveFloat | None] = None
    """Largest mean absolute difference, in nats. None measures it: three times what engine and learner differ by under the files
    that both start from, which may be 0.001 at most in float32, 0.2 in bfloat16, and 0.5 with rollout.quantization."""
    repair_tied_head: Mathematics[bool] = True
    """vLLM on CPU keeps the old vocabulary head of tied models after a reload; this packs it again. Off only to see the canary catch it."""
    timeout_s: Resources[PositiveFloat] = 600.0
