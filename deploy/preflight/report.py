"""The rows of `treadwheel check`: what the run will do."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from cluster.contracts.config import PromptsConfig, RunConfig
from cluster.contracts.sampling_config import SamplingConfig
from cluster.contracts.types import Reward, RewardStatus
from cluster.rollouts.mixture import Mixture
from cluster.sinks.console.words import for_terminal
from cluster.supervision.placement import PlacementPlan
from deploy.preflight.judge import Sample
from deploy.preflight.machine import GIB, Memory
from deploy.preflight.prompts import Looks, answered, trained_on, unseen_sources

if TYPE_CHECKING:
    from actors.reward_model import Reading

Rows = Iterator[tuple[str, str, str]]
_MOST_CHARACTERS = 240
_NUM_END_TOKENS = 6
"""Tokens of a prompt that are shown at either end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The rows (section, name, value), in reading order."""

    rows: tuple[tuple[str, str, str], ...]

    def table(self) -> Table:
        table = Table(box=None, show_header=False, pad_edge=False)
        shown = ""
        for section, name, value in self.rows:
            table.add_row(
                "" if section == shown else Text(section, style="bold"),
                Text(for_terminal(name)),
                Text(for_terminal(value)),
            )
            shown = section
        return table


def batch_rows(config: RunConfig) -> Rows:
    buffer, learner = config.buffer, config.learner
    groups, each = buffer.groups_per_step, buffer.trajectories_per_group
    yield "batch", "trajectories per step", f"{groups} groups x {each} = {groups * each}"
    shared = f" in groups of {learner.sequence_parallel_size}" if learner.sequence_parallel_size > 1 else ""
    yield (
        "batch",
        "per group of learner ranks" if shared else "per learner rank",
        f"{-(-groups * each // learner.data_parallel_size)} of {learner.num_ranks} rank(s){shared}",
    )
    if not config.has_episodes:
        yield "batch", "completion tokens per step", f"at most {groups * each * config.sampling.max_tokens:,}"
    yield (
        "batch",
        "tokens per micro-batch",
        f"at most {learner.max_tokens_per_micro_batch * learner.sequence_parallel_size:,}",
    )
    yield "batch", "groups under way", f"at most {buffer.most_under_way}"


def prompt_rows(config: RunConfig, mixture: Mixture, looks: Looks) -> Rows:
    num_groups = config.num_steps * config.buffer.groups_per_step
    for source, weight in zip(mixture.sources, mixture.weights, strict=True):
        share = float(weight / sum(mixture.weights))
        repeats = f", without {source.num_duplicates:,} duplicate(s)" if config.prompts.deduplicate else ""
        epochs = f"{config.num_steps} steps use each {_few_digits(num_groups * share / len(source.rows))} times"
        name = source.name or config.prompts.name or ""
        yield (
            "prompts",
            name,
            f"{len(source.rows):,} prompts{repeats}; {f'{share:.1%} of groups; ' if source.name else ''}{epochs}",
        )
    if looks.num_scanned < len(mixture):
        yield "prompts", "lengths checked", f"only of the first {looks.num_scanned:,}"
    yield "prompts", "longest", f"{looks.longest:,} tokens"
    yield from limit_rows(config.prompts, looks, "prompts")
    yield "prompts", "first, as the model sees it", _shortened(looks.first_text)
    yield "prompts", "its tokens", _ends(looks.first_tokens)
    if note := answered(mixture):
        yield "prompts", "note", note
    if config.reference.by_source and (note := unseen_sources(mixture, config)):
        yield "prompts", "note", note
    yield "prompts", "chat template", "applied" if looks.is_templated else "not applied: the text is sent as it is"


def held_out_rows(config: RunConfig, mixture: Mixture, held_out: Mixture | None, looks: Looks | None) -> Rows:
    yield from limit_rows(config.evaluation.prompts, looks, "held-out prompts")
    num_evaluated = config.evaluation.num_prompts
    if held_out is not None and (note := trained_on(mixture, held_out, num_evaluated=num_evaluated)):
        yield "held-out prompts", "note", note


def limit_rows(prompts: PromptsConfig | None, looks: Looks | None, section: str) -> Rows:
    if prompts and looks and prompts.max_prompt_tokens is not None:
        counts = f"{looks.num_dropped:,} dropped, {looks.num_truncated:,} truncated"
        yield section, f"beyond {prompts.max_prompt_tokens:,} tokens", counts


def mathematics_rows(config: RunConfig, needs: frozenset[str]) -> Rows:
    algorithm = config.algorithm
    yield "algorithm", "advantage", algorithm.advantage.name
    yield "algorithm", "policy loss", algorithm.policy_loss.name
    yield "algorithm", "needs", ", ".join(sorted(needs)) or "only the rollout's log-probs"
    for note in (
        biased_sampling(config.sampling),
        quantized_sampling(config),
        rounded_adapter(config),
        long_warmup(config),
        *other_lengths(config),
    ):
        if note:
            yield "algorithm", "note", note


def biased_sampling(sampling: SamplingConfig) -> str | None:
    """A note if the learner's log-probs ignore a setting that shapes the sampled distribution."""
    if not (names := sampling.biased()):
        return None
    return (
        f"sampling.{', sampling.'.join(names)}: the learner's log-probs are of the distribution without it, so ratios are biased; "
        "mismatch/mean_abs_nats measures by how much"
    )


def quantized_sampling(config: RunConfig) -> str | None:
    """A note if a quantized engine samples and no correction weighs its mismatch."""
    if config.rollout.quantization is None or config.algorithm.corrections:
        return None
    return (
        f"rollout.quantization={config.rollout.quantization}: the engine samples from a policy rounded to 8 bits, and "
        "algorithm.corrections is empty; [tis] with algorithm.proximal=recompute weighs each token by the learner's probability over the "
        "engine's, at most 2; mismatch/mean_abs_nats measures the difference of their log-probs"
    )


def rounded_adapter(config: RunConfig) -> str | None:
    """A note if the engines' weights lose a small adapter to rounding."""
    lora = config.learner.lora
    if lora is None or lora.publish == "adapter" or config.model.dtype != "bfloat16":
        return None
    return (
        "learner.lora.publish=merged with model.dtype=bfloat16: the sum of base and adapter is rounded to bfloat16, so engines lose "
        "changes of less than 0.2 to 0.4% of a weight, and with a small adapter sample almost from the base model; use "
        "learner.lora.publish=adapter, which loses none"
    )


def other_lengths(config: RunConfig) -> Iterator[str]:
    """A note for each variant whose `max_length` is not the longest completion: perhaps that of the run whose file this one began with."""
    algorithm, turns = config.algorithm, config.episodes.max_turns if config.has_episodes else 1
    summed = {"aggregation": algorithm.aggregation}
    if algorithm.value is not None:
        summed["value.aggregation"] = algorithm.value.aggregation
    answers = {f"reward_shaping[{index}]": each for index, each in enumerate(algorithm.reward_shaping) if turns == 1}
    for field, variant in (summed | answers).items():
        longest, length = config.sampling.max_tokens * turns, variant.params.get("max_length")
        if length not in (None, longest):
            bound = "sampling.max_tokens" + (" * episodes.max_turns" if config.has_episodes else "")
            yield (
                f"algorithm.{field}.max_length={length}, and the longest completion has {bound}={longest}; leave max_length out to follow "
                "it, if that is not on purpose"
            )


def long_warmup(config: RunConfig) -> str | None:
    """A note if the run ends while its learning rate still rises, or before it falls."""
    optimizer, value = config.optimizer, config.algorithm.value
    warmup, before = optimizer.warmup_steps, 0 if value is None else value.warmup_steps
    steps = config.num_steps - before
    after = f" after algorithm.value.warmup_steps={before}" if before else ""
    settings = f"optimizer.warmup_steps={warmup} with num_steps={config.num_steps}{after}"
    if warmup > steps:
        return f"{settings}: the last step reaches only {steps / warmup:.0%} of optimizer.learning_rate; use fewer warmup steps"
    falls = optimizer.schedule != "constant" and optimizer.min_learning_rate_share < 1
    if falls and 0 < warmup >= steps - 1:
        never = f"optimizer.schedule={optimizer.schedule!r} never lowers it"
        return f"{settings}: the last step has the highest learning rate, and {never}; use fewer warmup steps"
    return None


def judge_rows(config: RunConfig, samples: Sequence[Sample]) -> Rows:
    if config.judges_nothing:
        yield "reward", "judge", "none: environments reward their episodes"
    elif judge := config.reward.only_judge:
        yield "reward", "judge", judge.name
    for name, part in config.reward.parts.items():
        yield "reward", name, f"{part.judge.name}, weight {part.weight:g}"
    for name, server in config.reward.servers.items():
        yield (
            "reward",
            f"server {name}",
            f"{server.path} x {server.num_servers}; its judges are not tried by this check",
        )
    for completion in dict.fromkeys(sample.completion for sample in samples):
        rewards = [_shown(sample.reward) for sample in samples if sample.completion == completion]
        yield "reward", completion, "; ".join(dict.fromkeys(rewards))


def reward_model_rows(models: Mapping[str, "Reading"]) -> Rows:
    for name, model in models.items():
        yield (
            "reward",
            f"model {name}",
            f"{', '.join(model.labels)}; not run by this check, which takes 0 for its scores",
        )


def placement_rows(placement: PlacementPlan | None) -> Rows:
    if placement is None:
        yield "placement", "", "decided on the cluster"
        return
    for bundle in placement.bundles:
        gpus = f", {bundle.gpus:g} GPUs" if bundle.gpus else ""
        yield "placement", bundle.name, f"{bundle.cpus:g} CPUs{gpus}, {bundle.num_threads} thread(s)"
    for note in placement.notes():
        yield "placement", "note", note


def memory_rows(memory: Memory) -> Rows:
    yield "memory", "parameters", f"{memory.num_parameters / 1e6:,.1f} million, {memory.dtype}"
    yield "memory", "learner rank", _gib(memory.rank)
    yield "memory", "rollout worker", f"{_gib(memory.worker)}, {memory.cache}"
    if memory.reference is not None:
        yield "memory", "reference scorer", _gib(memory.reference)
    for name, size_bytes in memory.judging.items():
        yield "memory", name, _gib(size_bytes)
    if memory.free is not None:
        verdict = "" if memory.total <= memory.free else " (tight: the run may swap or be killed)"
        yield "memory", "all together", f"{_gib(memory.total)} of {_gib(memory.free)} free{verdict}"


def _shown(reward: Reward) -> str:
    if reward.status is not RewardStatus.OK:
        return f"{reward.status}: {reward.message}"
    components = ", ".join(
        f"{name} {'none' if value is None else f'{value:g}'}" for name, value in reward.components.items()
    )
    return f"{reward.value:g}" + (f" ({components})" if components else "")


def _few_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _shortened(text: str) -> str:
    shown = repr(text)
    half = _MOST_CHARACTERS // 2
    return shown if len(shown) <= _MOST_CHARACTERS else f"{shown[:half]} ... {shown[-half:]}"


def _ends(tokens: Sequence[str]) -> str:
    shown = [*map(repr, tokens)]
    if len(shown) > 2 * _NUM_END_TOKENS:
        shown[_NUM_END_TOKENS:-_NUM_END_TOKENS] = ["..."]
    return f"{len(tokens)}: {' '.join(shown)}"


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.2f} GiB"
