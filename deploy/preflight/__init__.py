"""Everything that can be known to fail before anything starts.

All problems are named at once: first those of what the user wrote, then of the model, the prompts and the judge, the machine's last. A
check that needs the result of a failed one is left out. What needs torch or transformers is imported where it is used.
"""

import contextlib
import os

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import StorageError
from cluster.contracts.plugins import prompt_source
from cluster.record.run_directory import RunDirectory
from deploy.preflight import judge, machine, model, prompts, report, settings
from deploy.preflight.problems import Problems
from deploy.preflight.report import Report


def check(config: RunConfig, *, address: str | None = None) -> Report:
    """Starts nothing but the judge, on samples. Raises one ConfigError with all problems.

    On a cluster that runs already (`address`), its resources are checked once the run has connected to it.
    """
    # Nothing else that is wrong matters while another run has the directory, and the answer should come at once. One that cannot be
    # read is a problem among others.
    with contextlib.suppress(StorageError):
        RunDirectory(config.run_dir).refuse_if_busy()
    is_local = _is_local(address)
    problems = Problems()
    problems.attempt(settings.check_run_dir, config)
    problems.attempt(settings.check_transport, config)
    problems.attempt(settings.check_sinks, config)
    problems.attempt(settings.check_tensor_parallel, config)
    objective = problems.attempt(settings.check_mathematics, config)
    needs, numbers = (objective.needs, objective.columns) if objective else (frozenset[str](), ())
    problems.attempt(settings.check_environment, config, is_local=is_local)

    formatter = problems.attempt(model.load_formatter, config)
    problems.attempt(model.check_reference, config)
    problems.attempt(model.check_critic, config)
    has_room = False
    if formatter is not None:
        has_room = problems.attempt(model.check_room, config, formatter) is not None
        problems.attempt(model.check_adapters, config)
        problems.attempt(prompts.check_demonstrations, config)
    problems.attempt(model.check_attention, config, is_local=is_local)

    source = problems.attempt(prompt_source, config.prompts, field="prompts")
    named = {f"sampling.columns.{name}": column for name, column in config.sampling.columns.items()}
    if config.reference.by_source:
        named["reference.source_column"] = config.reference.source_column
    if source is not None:
        problems.attempt(prompts.check_columns, source, named, config, field="prompts", numbers=numbers)
    looks = None
    if source is not None and formatter is not None and has_room:
        looks = problems.attempt(prompts.check_lengths, source, formatter, config)
    held_out = None
    if config.evaluation.prompts is not None:
        held_out = problems.attempt(prompt_source, config.evaluation.prompts, field="evaluation.prompts")
        if held_out is not None and formatter is not None and has_room:
            problems.attempt(prompts.check_held_out, held_out, formatter, config)
        if held_out is not None:
            # A held-out prompt without a value of its own is sampled as the run says.
            column = config.evaluation.source_column
            named = {} if column is None else {"evaluation.source_column": column}
            problems.attempt(prompts.check_columns, held_out, named, config, field="evaluation.prompts")
    opened = {"prompts": source, "evaluation.prompts": held_out}
    sources = {field: each for field, each in opened.items() if each is not None}
    samples = problems.attempt(judge.judge_samples, config.reward, sources, formatter) if sources else None

    problems.attempt(machine.check_batch, config, is_local=is_local)
    placement = problems.attempt(machine.place, config, needs, is_local=is_local)
    memory = None
    if formatter is not None and (placement is not None or not is_local):
        memory = problems.attempt(machine.estimate, config, needs, is_local=is_local)
    problems.raise_all()
    assert source is not None and looks and samples and memory, "no problem, so all of it is known"
    return Report(
        rows=(
            *report.batch_rows(config),
            *report.prompt_rows(config, source, looks),
            *report.mathematics_rows(config, needs),
            *report.judge_rows(config, samples),
            *report.placement_rows(placement),
            *report.memory_rows(memory),
        )
    )


def check_learning(config: RunConfig, *, address: str | None = None) -> None:
    """As `check`, for a run that learns from recorded trajectories: nothing of prompts and judges."""
    is_local = _is_local(address)
    problems = Problems()
    problems.attempt(settings.check_run_dir, config)
    problems.attempt(settings.check_sinks, config)
    problems.attempt(settings.check_mathematics, config)
    problems.attempt(model.check_reference, config)
    if problems.attempt(model.load_formatter, config) is not None:
        problems.attempt(model.check_adapters, config)
        problems.attempt(prompts.check_demonstrations, config)
    problems.attempt(model.check_attention, config, is_local=is_local)
    problems.raise_all()


def _is_local(address: str | None) -> bool:
    """The run starts a cluster of its own, on this machine."""
    return address is None and "RAY_ADDRESS" not in os.environ


__all__ = ["Report", "check", "check_learning"]
