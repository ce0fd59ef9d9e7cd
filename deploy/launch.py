"""Starts a run or resumes it from its directory, takes it to its last step, and ends it in order."""

import asyncio
import contextlib
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from actors.chat.limit import PromptLimit
from cluster.contracts.config import ModelConfig, PromptsConfig, RunConfig
from cluster.contracts.errors import CheckpointError, ConfigError, PreemptedError, StorageError, TreadwheelError
from cluster.contracts.types import Prompt
from cluster.controller import Evaluator
from cluster.controller import train as run_loop
from cluster.learner_group import LearnerGroup
from cluster.metrics import MetricLog, Sink, open_log
from cluster.record.ledger import Ledger
from cluster.record.run_directory import CHECKPOINTS, EVENTS, PASSPORT, RunDirectory
from cluster.record.storage import Storage
from cluster.rollouts.buffer import Buffer
from cluster.rollouts.mixture import open_prompts
from cluster.rollouts.pass_rates import PassRates
from cluster.rollouts.tickets import TicketOffice
from cluster.saving import SavingRules
from cluster.sinks.console import console
from deploy.cluster_up.ahead import RayAhead, named
from deploy.cluster_up.connection import connected
from deploy.cluster_up.orders import waiting_orders
from deploy.cluster_up.start_up import cluster
from deploy.cluster_up.steering import Steering
from deploy.cluster_up.stopping import Stop, how_it_goes_on, saved_when_stopped, told_if_gone, until_interrupted
from deploy.cluster_up.wiring import Cluster
from deploy.config.loading import resolved_yaml
from deploy.config.spelling import spelled_out
from deploy.formatters import load_formatter
from deploy.named_files import refuse_other_files
from deploy.preflight.compute_type import with_compute_type
from deploy.preflight.machine import is_own_cluster
from deploy.preflight.report import biased_sampling, long_warmup, quantized_sampling
from deploy.prompt_rows import refuse_other_rows
from deploy.reports.provenance import RunProvenance
from deploy.reports.report import leave
from deploy.reports.summary import Summary, summarize
from deploy.versions import versions


def train(
    config: RunConfig,
    *,
    address: str | None = None,
    ahead: RayAhead | None = None,
    sinks: Sequence[Sink] = (),
    stop: Stop | None = None,
) -> Summary:
    """Trains `config` to its last step, or resumes it from its run directory. Without an `address` it uses the local Ray of `ahead`, or
    starts one.

    `sinks` get numbers and events in addition to the sinks that `config` names. `stop` stops the run.

    Raises our own errors, and KeyboardInterrupt for Ctrl-C, SIGTERM and `stop`. If the node of the learner or the driver goes away,
    raises PreemptedError. The messages of the last two say how to resume.
    """
    if config.recorded is not None:
        raise ConfigError(f"recorded={config.recorded!r}: such a run samples nothing; start it with `treadwheel learn`")
    return as_a_run(config, partial(_train, ahead=ahead), address=address, sinks=sinks, stop=stop)


def as_a_run(
    config: RunConfig,
    work: Callable[..., Coroutine[Any, Any, None]],
    *,
    address: str | None,
    sinks: Sequence[Sink] = (),
    stop: Stop | None = None,
) -> Summary:
    """Awaits `work(config, run_dir, log, interrupted=..., address=...)` as the owner of the run directory, with a compute type chosen.
    `address`, `sinks`, `stop` and errors as for `train`."""
    run_dir, interrupted = RunDirectory(config.run_dir), asyncio.Event()
    config, chosen = with_compute_type(config, address=address)
    doing = partial(work, config, run_dir, interrupted=interrupted, address=address)
    try:
        owning = _owning(config, run_dir, doing, sinks, chosen=chosen)
        with told_if_gone(
            "treadwheel: the run's own process ended without a word: it was killed from outside (kill -9, or the system when memory ran "
            "out), or Ray ended it, since Ray's processes on this machine or its head are gone; the same command goes on, and "
            f"{shlex.join(['treadwheel', 'info', run_dir.url])} says from where"
        ):
            asyncio.run(until_interrupted(owning, interrupted=interrupted, stop=stop))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(how_it_goes_on(run_dir)) from None
    except PreemptedError as error:
        raise PreemptedError(f"{error}; {how_it_goes_on(run_dir)}", deadline=error.deadline) from None
    except TreadwheelError as error:
        if error.details:
            error.add_note(f"its traceback: {run_dir.path(EVENTS)}, the last event that failed")
        raise
    return summarize(run_dir)


async def _owning(
    config: RunConfig,
    run_dir: RunDirectory,
    work: Callable[[MetricLog], Coroutine[Any, Any, None]],
    sinks: Sequence[Sink],
    *,
    chosen: str | None,
) -> None:
    """From claim to release no signal raises, since Python drops a KeyboardInterrupt in a destructor or an import callback."""
    run_dir.claim(resolved_yaml(config), spelled_out=spelled_out)
    with _released_in_the_end(run_dir):
        async with _reported_in_the_end(run_dir):
            for order in waiting_orders(run_dir):  # to an earlier driver; later orders are for this one
                run_dir.remove(order)
            with open_log(config.metrics, directory=run_dir, num_steps=config.num_steps, sinks=sinks) as log:
                async with noting_the_end(log):
                    moved = {"moved": run_dir.moved} if run_dir.moved else {}
                    log.event("launched", started_at=psutil.Process().create_time(), versions=versions(), **moved)
                    if chosen is not None:
                        log.event("compute_type", dtype=config.model.dtype, message=f"computes in {chosen}")
                    if note := long_warmup(config):
                        log.event("long_warmup", message=note)
                    paths = (config.model.path, config.reference.path, *config.reference.by_source.values())
                    await asyncio.to_thread(_verify_models, *paths)
                    await work(log)


@contextlib.contextmanager
def _released_in_the_end(run_dir: RunDirectory) -> Iterator[None]:
    """Releases the directory. An error of the run takes precedence over one of the release, which is then only printed."""
    try:
        yield
    except BaseException:
        try:
            run_dir.release()
        except StorageError as error:
            print(f"treadwheel: {error}", file=sys.stderr, flush=True)
        raise
    run_dir.release()


@contextlib.asynccontextmanager
async def _reported_in_the_end(run_dir: RunDirectory) -> AsyncIterator[None]:
    """Writes curves and report, also for a run that failed or was stopped. A node that goes away leaves no time for them."""
    try:
        yield
    except PreemptedError:
        raise
    except BaseException:
        await asyncio.to_thread(leave, run_dir)
        raise
    await asyncio.to_thread(leave, run_dir)


def evaluate(config: RunConfig, *, address: str | None = None) -> dict[str, float]:
    """Metrics of one held-out evaluation of the model that `config` starts from.

    Raises ConfigError without held-out prompts, CheckpointError for a checkpoint's model that is not what was saved.
    """
    config, _ = with_compute_type(config, address=address)
    return asyncio.run(until_interrupted(_evaluate(config, RunDirectory(config.run_dir), address=address)))


def _verify_models(*paths: str | None) -> None:
    from learner.checkpoint.reading import verify_model

    for path in paths:
        if path is not None:
            verify_model(Path(path))


@contextlib.asynccontextmanager
async def noting_the_end(log: MetricLog) -> AsyncIterator[None]:
    """Logs the end of the run as its last event. Entered a second time inside `connected`: Ray's metrics need it before Ray shuts down."""
    try:
        yield
    except (asyncio.CancelledError, PreemptedError):
        log.end("stopped")
        raise
    except BaseException as error:
        details = getattr(error, "details", None)
        more = {} if details is None else {"details": details}
        log.end("failed", error=type(error).__name__, reason=str(error), **more)
        raise
    log.end("finished")


async def _train(
    config: RunConfig,
    run_dir: RunDirectory,
    log: MetricLog,
    *,
    interrupted: asyncio.Event,
    address: str | None,
    ahead: RayAhead | None = None,
) -> None:
    ledger = open_ledger(run_dir, log)
    if await is_done(config, run_dir, ledger, log):
        return
    note_resumed(ledger, log)
    office = ticket_office(config, ledger)
    if ledger.version:
        refuse_other_rows(run_dir, office.source)
        await asyncio.to_thread(refuse_other_files, run_dir, config)
    else:
        run_dir.remove(PASSPORT)  # of a driver that learned nothing, perhaps with other rows or files
    evaluator = make_evaluator(config)
    if note := biased_sampling(config.sampling):
        log.event("biased_sampling", settings=config.sampling.biased(), message=note)
    if note := quantized_sampling(config):
        log.event("quantized_sampling", quantization=config.rollout.quantization, message=note)
    log.add(provenance := RunProvenance(run_dir, identity=config.evaluation.identity))
    waits = _wait_for_nodes_s(config, address)
    stop_s = config.checkpoint.stop_timeout_s
    saved = partial(saved_when_stopped, interrupted=interrupted, timeout_s=stop_s, log=log)
    making = cluster(
        config, run_dir, ledger, log, office=office, wait_for_nodes_s=waits, provenance=provenance.at, saved=saved
    )
    log.event("connecting", address=named(address))
    async with (
        connected(address, run_dir=run_dir, ahead=ahead),
        noting_the_end(log),
        making as made,
        saved(made.learner),
        Steering(config, cluster=made, run_dir=run_dir, log=log).steering(),
    ):
        await _evaluate_what_was_broken_off(config, made, evaluator, provenance, log)
        await run_loop(
            config,
            rollouts=made.production,
            fleet=made.production.fleet,
            learner=made.learner,
            buffer=make_buffer(config, version=made.learner.version, next_index=ledger.next_index),
            weights=made.weights,
            log=log,
            timesheet=made.timesheet,
            evaluator=evaluator,
        )
        await _save_the_end(made, evaluator, log)


def open_ledger(run_dir: RunDirectory, log: MetricLog) -> Ledger:
    """Logs the lines that a crash tore."""
    ledger = Ledger(run_dir)
    if ledger.num_torn_lines:
        log.event("ledger_torn", num_lines=ledger.num_torn_lines, recorded_steps=ledger.version)
    return ledger


def note_resumed(ledger: Ledger, log: MetricLog) -> None:
    """Logs the step from which the run resumes, if any is recorded."""
    if ledger.version:
        log.event("resumed", recorded_steps=ledger.version)


async def is_done(config: RunConfig, run_dir: RunDirectory, ledger: Ledger, log: MetricLog) -> bool:
    """Whether nothing is left to learn, save or evaluate; logs it. False for a damaged checkpoint: restoring deals with it."""
    try:
        if not config.num_steps <= ledger.version == max(run_dir.checkpoints(), default=0):
            return False
        from learner.checkpoint import reading

        newest = reading.checkpoints(Storage(run_dir.path(CHECKPOINTS)))[-1]
        is_rated = config.recorded is None and config.evaluation.prompts is not None
        manifest = reading.read_manifest(newest)
        if is_rated and SavingRules(config).own_rating(manifest.metric, rated_by=manifest.rated_by) is None:
            return False
        await asyncio.to_thread(reading.verify, newest)
    except (CheckpointError, StorageError):
        return False
    schedule, more = config.optimizer.schedule, "with more num_steps the run goes on"
    if schedule != "constant":
        more = f"optimizer.schedule={schedule} ended with them: begin another run_dir with model.path={newest.path('model')} for more"
    message = f"all {ledger.version} steps are learned and saved; {more}"
    log.event("nothing_left", recorded_steps=ledger.version, message=message)
    return True


async def _evaluate_what_was_broken_off(
    config: RunConfig, made: Cluster, evaluator: Evaluator | None, provenance: RunProvenance, log: MetricLog
) -> None:
    """Repeats an evaluation that a stop or a kill cut short, unless it is that of the last step."""
    learner, every_steps = made.learner, config.evaluation.every_steps
    if evaluator is None or every_steps is None or not 0 < learner.version < config.num_steps:
        return
    is_saved = learner.saved_version == learner.version
    is_evaluated = learner.saved_metric is not None if is_saved else provenance.is_evaluated(learner.version)
    if learner.version % every_steps or is_evaluated:
        return
    held_out = await evaluator.run(made.production, version=learner.version, log=log)
    log.step(learner.version, held_out)
    if is_saved:
        await learner.save(held_out["eval/reward"])
    else:
        learner.rate(held_out["eval/reward"])


async def _save_the_end(made: Cluster, evaluator: Evaluator | None, log: MetricLog) -> None:
    """Completes a run that was stopped between its last step and the end of its evaluation, or whose last save failed. Raises
    CheckpointError."""
    learner = made.learner
    if learner.saved_version != learner.version:  # first: an evaluation takes long, and may be stopped
        await save_the_end(learner, metric=None)
    if evaluator is None or learner.saved_metric is not None:
        return
    held_out = await evaluator.run(made.production, version=learner.version, log=log)
    log.step(learner.version, held_out)
    await save_the_end(learner, metric=held_out["eval/reward"])


async def save_the_end(learner: LearnerGroup, *, metric: float | None) -> None:
    """Saves the last step. Raises CheckpointError if that fails."""
    await learner.save(metric)
    if learner.saved_version != learner.version:
        raise CheckpointError(
            f"the weights of the last step, {learner.version}, were not saved; events.jsonl says why. "
            "Mend that and start the same command again: it learns from the record and saves"
        )


async def _evaluate(config: RunConfig, run_dir: RunDirectory, *, address: str | None) -> dict[str, float]:
    await asyncio.to_thread(_verify_models, config.model.path)
    evaluator = make_evaluator(config)
    if evaluator is None:
        raise ConfigError("evaluation.prompts is not set; name a held-out prompt source")
    with MetricLog([console(directory=run_dir, num_steps=0)]) as log:  # it prints failures of judges
        waits, ledger = _wait_for_nodes_s(config, address), Ledger(run_dir)
        async with (
            connected(address),
            cluster(config, run_dir, ledger, log, wait_for_nodes_s=waits) as made,
        ):
            return await evaluator.run(made.production, version=0, log=log)


def _wait_for_nodes_s(config: RunConfig, address: str | None) -> float | None:
    """None for the run's own cluster, which no node joins."""
    return None if is_own_cluster(address) else config.elastic.wait_for_nodes_s


def make_buffer(config: RunConfig, *, version: int = 0, next_index: int = 0) -> Buffer:
    """The run's buffer after `version` recorded steps; `next_index` is the next group in start order."""
    return Buffer(
        groups_per_step=config.buffer.groups_per_step,
        max_off_policy_steps=config.buffer.max_off_policy_steps,
        num_steps=config.num_steps,
        max_size_bytes=config.buffer.max_size_bytes,
        max_head_of_line_s=config.buffer.max_head_of_line_s,
        max_dropped_steps=config.buffer.max_dropped_steps,
        in_waves=config.deterministic,
        prompts_depend_on_steps=config.prompts.difficulty is not None,
        version=version,
        next_index=next_index,
    )


def ticket_office(config: RunConfig, ledger: Ledger) -> TicketOffice:
    """Opens the run's prompts, with the pass rates that the ledger recorded. Raises ConfigError for a source that cannot be opened."""
    return TicketOffice(
        source=open_prompts(config.prompts, field="prompts", source_column=config.reward.source_column),
        seed=config.seed,
        trajectories_per_group=config.judged_per_group,
        extra_trajectories=0 if config.algorithm.selection else config.rollout.extra_trajectories,
        sampling=config.sampling,
        num_ahead=config.buffer.groups_per_step,
        fit=_prompt_limit(config.prompts, config.model, field="prompts"),
        pass_rates=_pass_rates(config, ledger),
    )


def _pass_rates(config: RunConfig, ledger: Ledger) -> PassRates | None:
    if config.prompts.difficulty is None:
        return None
    lag = config.buffer.max_off_policy_steps * config.buffer.groups_per_step
    recorded = ((record.next_index, record.pass_rates or {}) for record in ledger.records())
    return PassRates(config.prompts.difficulty, lag=lag, recorded=recorded)


def _prompt_limit(prompts: PromptsConfig, model: ModelConfig, *, field: str) -> PromptLimit | None:
    """None: the context is the only limit. Raises ConfigError for a tokenizer that cannot be opened."""
    if prompts.max_prompt_tokens is None:
        return None
    return PromptLimit(prompts, load_formatter(model), field=field)


def make_evaluator(config: RunConfig) -> Evaluator | None:
    """None if the run has no held-out prompts. Raises ConfigError if all of them are too long."""
    if (held_out := config.evaluation.prompts) is None:
        return None
    source = open_prompts(held_out, field="evaluation.prompts", source_column=config.reward.source_column)
    if (limit := _prompt_limit(held_out, config.model, field="evaluation.prompts")) is None:
        return Evaluator(config=config, source=source)
    fitting: list[Prompt] = []
    num_too_long = 0
    for row in range(len(source)):
        if fitted := limit(source[row]):
            fitting.append(fitted)
        else:
            num_too_long += 1
        if len(fitting) == config.evaluation.num_prompts:
            break
    if not fitting:
        raise ConfigError(
            f"evaluation.prompts.max_prompt_tokens={limit.max_tokens}: all {num_too_long:,} prompts are longer; raise it"
        )
    return Evaluator(config=config, source=fitting, num_too_long=num_too_long)
