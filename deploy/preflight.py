"""Everything that can be known to fail before anything starts. `treadwheel check` prints what it finds, `train` calls it first.

Cheap checks come first; what needs torch or transformers is imported where it is used. Raises ConfigError for the first problem.
"""

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError, DataError
from cluster.contracts.plugins import PROMPTS, TRANSPORTS, Plugin, resolve
from cluster.contracts.protocols import PromptSource
from cluster.contracts.types import Prompt
from cluster.metrics import resolve_sink
from cluster.record.run_directory import RunDirectory
from cluster.supervision.placement import ClusterResources, Node, PlacementPlan, needs_reference, plan
from deploy.config.loading import resolved_yaml

_PROMPT_SCAN_S = 5.0
"""Longest look at the prompts' lengths: all of a file's, some thousands of a generated source."""
_GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a run will be: (section, name, value) in reading order."""

    rows: tuple[tuple[str, str, str], ...]

    def table(self) -> Table:
        table = Table(box=None, show_header=False, pad_edge=False)
        shown = ""
        for section, name, value in self.rows:
            table.add_row("" if section == shown else f"[bold]{section}[/]", name, value)
            shown = section
        return table


def check(config: RunConfig, *, address: str | None = None) -> Report:
    """Starts nothing. On a cluster that runs already (`address`), its resources are checked once the run has connected to it."""
    run_dir = RunDirectory(config.run_dir)
    if not run_dir.is_local:
        raise ConfigError(
            f"run_dir={config.run_dir!r}: the learner cannot write checkpoints to an object store yet; "
            "use a local path or a shared file system that all nodes mount"
        )
    run_dir.check(resolved_yaml(config))
    _check_plugins(config)
    is_local = address is None and "RAY_ADDRESS" not in os.environ
    needs = _check_mathematics(config)
    placement = plan(config, this_machine(), needs=needs) if is_local else None
    formatter = _check_model(config)
    source = _open_prompts(config.prompts, field="prompts")
    _check_judge(config, source[0])
    num_scanned = _check_lengths(source, formatter, config, field="prompts")
    if config.evaluation.prompts is not None:
        held_out = _open_prompts(config.evaluation.prompts, field="evaluation.prompts")
        _check_lengths(held_out, formatter, config, field="evaluation.prompts", most=config.evaluation.num_prompts)
    return Report(
        rows=(
            *_batch_rows(config, source, num_scanned),
            *_mathematics_rows(config, needs),
            *_placement_rows(placement),
            *_memory_rows(config, needs=needs, is_local=is_local),
        )
    )


def this_machine() -> ClusterResources:
    """What a local Ray will find here."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = (
        len([each for each in visible.split(",") if each])
        if visible is not None
        else len(list(Path("/dev").glob("nvidia[0-9]*")))
    )
    return ClusterResources(nodes=(Node(cpus=float(len(os.sched_getaffinity(0))), gpus=float(gpus)),))


def _check_plugins(config: RunConfig) -> None:
    resolve(config.weights.transport, home=TRANSPORTS, field="weights.transport")
    for index in range(len(config.metrics.sinks)):
        resolve_sink(config.metrics, index)
    needed = config.rollout.tensor_parallel_size
    if needed > 1 and config.rollout.gpus_per_worker < needed:
        raise ConfigError(
            f"rollout.tensor_parallel_size={needed} needs as many GPUs, rollout.gpus_per_worker={config.rollout.gpus_per_worker:g}; "
            f"set rollout.gpus_per_worker={needed}"
        )


def _check_mathematics(config: RunConfig) -> frozenset[str]:
    """What the objective needs beside log-probs of policy and rollout."""
    from learner.algorithms.objective import Objective

    try:
        objective = Objective.from_config(config.algorithm)
        objective.check_group_size(config.buffer.trajectories_per_group)
        return objective.needs
    except ConfigError as error:
        raise ConfigError(f"algorithm: {error}") from error


def _check_model(config: RunConfig) -> Any:
    from actors.chat.formatter import ChatFormatter

    for field, path in (("model.path", config.model.path), ("reference.path", config.reference.path)):
        if path is not None:
            _check_folder(path, field=field)
    # A hub out of reach is one error, not a line per retry.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    formatter = ChatFormatter.load(config.model)
    if config.sampling.max_tokens >= formatter.max_context:
        raise ConfigError(
            f"sampling.max_tokens={config.sampling.max_tokens} leaves no room for a prompt in the context of {formatter.max_context} "
            "tokens; lower it, or raise model.max_context"
        )
    return formatter


def _check_folder(path: str, *, field: str) -> None:
    """A path that can only be a local one must be there: a hub look-up of it would fail late and say something else."""
    folder = Path(path).expanduser()
    if not folder.exists():
        if path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise ConfigError(
                f"{field}={path!r} does not exist; give a Hugging Face folder, or a hub name such as org/model"
            )
        return
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{field}={path!r} has no config.json; give a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{field}={path!r} has no *.safetensors; save the model with save_pretrained, which writes them"
        )
    from learner.checkpoint import files

    files.verify_model(folder)


def _open_prompts(plugin: Plugin, *, field: str) -> PromptSource:
    try:
        source = resolve(plugin, home=PROMPTS, field=field)()
    except DataError as error:
        raise ConfigError(f"{field}={plugin.name!r}: {error}") from error
    except ConfigError as error:  # a source calls itself `prompts`, wherever the run has it
        raise ConfigError(str(error) if str(error).startswith(field) else f"{field}: {error}") from error
    if len(source) == 0:
        raise ConfigError(f"{field}={plugin.name!r} has no prompts; give a source with at least one")
    return source


def _check_judge(config: RunConfig, prompt: Prompt) -> None:
    from actors.reward_service.judgement import check_judge, find_judge

    find_judge(config.reward.judge)
    check_judge(config.reward.judge, prompt)


def _check_lengths(
    source: PromptSource, formatter: Any, config: RunConfig, *, field: str, most: int | None = None
) -> int:
    """Number of prompts looked at, of the first `most` (None: all). Raises ConfigError for one that leaves no room for a completion."""
    deadline = time.monotonic() + _PROMPT_SCAN_S
    room = formatter.max_context - config.sampling.max_tokens
    for index in range(len(source) if most is None else min(most, len(source))):
        if time.monotonic() > deadline:
            return index
        prompt = source[index]
        # A token covers at least a byte, so a short text fits whatever the tokenizer; the first one is encoded in any case.
        if index and _num_bytes(prompt) < room // 2:
            continue
        try:
            num_tokens = len(formatter.encode(prompt).token_ids)
        except DataError as error:
            raise ConfigError(f"{field}: {error}") from error
        if num_tokens > room:
            raise ConfigError(
                f"{field}: prompt {prompt.prompt_id!r} has {num_tokens} tokens; with sampling.max_tokens="
                f"{config.sampling.max_tokens} the context of {formatter.max_context} has room for {room}; "
                "shorten or drop it, lower sampling.max_tokens, or raise model.max_context"
            )
    return len(source)


def _num_bytes(prompt: Prompt) -> int:
    texts = [prompt.text or "", *(str(message.get("content", "")) for message in prompt.messages or [])]
    return sum(len(text.encode()) for text in texts)


def _batch_rows(config: RunConfig, source: PromptSource, num_scanned: int) -> Iterator[tuple[str, str, str]]:
    buffer, learner = config.buffer, config.learner
    batch = buffer.groups_per_step * buffer.trajectories_per_group
    yield (
        "batch",
        "trajectories per step",
        f"{buffer.groups_per_step} groups x {buffer.trajectories_per_group} = {batch}",
    )
    yield "batch", "per learner rank", f"{-(-batch // learner.num_ranks)} of {learner.num_ranks} rank(s)"
    yield "batch", "completion tokens per step", f"at most {batch * config.sampling.max_tokens:,}"
    yield "batch", "tokens per micro-batch", f"at most {learner.max_tokens_per_micro_batch:,}"
    yield "batch", "groups under way", f"at most {buffer.groups_per_step * (buffer.max_off_policy_steps + 1)}"
    epochs = config.num_steps * buffer.groups_per_step / len(source)
    yield "prompts", config.prompts.name, f"{len(source):,}; {config.num_steps} steps see each {epochs:.2g} times"
    if num_scanned < len(source):
        yield "prompts", "lengths checked", f"of the first {num_scanned:,} only"


def _mathematics_rows(config: RunConfig, needs: frozenset[str]) -> Iterator[tuple[str, str, str]]:
    algorithm = config.algorithm
    yield "algorithm", "advantage", algorithm.advantage.name
    yield "algorithm", "policy loss", algorithm.policy_loss.name
    yield "algorithm", "needs", ", ".join(sorted(needs)) or "nothing more than the rollout's log-probs"
    yield "algorithm", "reward", config.reward.judge.name
    if config.sampling.top_k or config.sampling.top_p < 1:
        yield (
            "algorithm",
            "note",
            "top_k or top_p truncate sampling: the learner's log-probs are of the full softmax, ratios are biased",
        )


def _placement_rows(placement: PlacementPlan | None) -> Iterator[tuple[str, str, str]]:
    if placement is None:
        yield "placement", "", "decided on the cluster"
        return
    for bundle in placement.bundles:
        gpus = f", {bundle.gpus:g} GPUs" if bundle.gpus else ""
        yield "placement", bundle.name, f"{bundle.cpus:g} CPUs{gpus}, {bundle.num_threads} thread(s)"
    if placement.is_time_shared:
        yield "placement", "note", "fewer CPUs than asked for: actors share them"
    if placement.num_missing_workers:
        yield "placement", "note", f"{placement.num_missing_workers} more rollout worker(s) join when nodes do"


def _memory_rows(config: RunConfig, *, needs: frozenset[str], is_local: bool) -> Iterator[tuple[str, str, str]]:
    from learner import memory
    from learner.model.policy import read_config

    model = read_config(config.model)
    rank = memory.estimate(
        model,
        model=config.model,
        learner=config.learner,
        checkpoint=config.checkpoint,
        has_own_critic=_has_own_critic(config),
    )
    weights = rank.num_parameters * (2 if config.model.dtype == "bfloat16" else 4)
    yield "memory", "parameters", f"{rank.num_parameters / 1e6:,.1f} million, {config.model.dtype}"
    yield "memory", "learner rank", _gib(rank.total_bytes)
    on_gpus = config.rollout.gpus_per_worker > 0
    worker = weights + (0 if on_gpus else config.rollout.kv_cache_bytes or _GIB)
    cache = (
        f", and the cache in {config.rollout.gpu_memory_utilization:.0%} of its GPU" if on_gpus else " with its cache"
    )
    yield "memory", "rollout worker", f"{_gib(worker)}{cache}"
    total = rank.total_bytes * config.learner.num_ranks + worker * config.rollout.num_workers
    if needs_reference(config, needs=needs):
        yield "memory", "reference scorer", _gib(weights)
        total += weights
    if is_local and not on_gpus and config.learner.gpus_per_rank == 0:
        free = psutil.virtual_memory().available
        memory.check_fits(rank, free_bytes=free, model=config.model)
        verdict = "" if total <= free else " (tight: this may swap or be killed)"
        yield "memory", "all together", f"{_gib(total)} of {_gib(free)} free{verdict}"


def _has_own_critic(config: RunConfig) -> bool:
    return config.algorithm.value is not None and config.algorithm.value.backbone == "own"


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / _GIB:.2f} GiB"
