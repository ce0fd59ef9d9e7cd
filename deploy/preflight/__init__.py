"""Checks of a run before anything starts.

One error names all problems: of the settings first, then of model, prompts and judges, and of the machine last. A check that needs the
result of a failed check is skipped. Modules that need torch or transformers are imported where they are used.
"""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from cluster.contracts.config import RunConfig
from cluster.metrics import resolve_sink
from cluster.record.stored_models import with_local_models
from cluster.rollouts.mixture import Mixture, open_prompts
from cluster.supervision.placement import plan
from deploy.preflight import (
    asked_memory,
    assumed,
    chat,
    environments,
    judge,
    machine,
    model,
    prompts,
    quantization,
    report,
    settings,
)
from deploy.preflight.asked_memory import Ask, asks_nobody
from deploy.preflight.at_once import begun, check_sampling
from deploy.preflight.compute_type import of_type, with_compute_type
from deploy.preflight.hardware import Hardware
from deploy.preflight.judge import Sample
from deploy.preflight.problems import Problems
from deploy.preflight.prompts import Looks
from deploy.preflight.report import Report
from deploy.preflight.sandbox import check_sandboxes
from deploy.preflight.servers import server_rows

if TYPE_CHECKING:
    from actors.chat.formatter import ChatFormatter
    from actors.reward_model import Reading
    from deploy.recorded import RecordedGroups
    from learner.algorithms.objective import Objective


def check(
    config: RunConfig,
    *,
    address: str | None = None,
    plays: bool = False,
    looks_good: Callable[[], None] = lambda: None,
    ask: Ask = asks_nobody,
) -> Report:
    """Starts only the judges, on samples, and the environments. Raises one ConfigError with all problems.

    `address` names a running cluster: its resources are checked later, once the run has connected. `plays`: the first prompt of each
    environment is played twice. `looks_good` is called when no setting is wrong, before the slow checks of model, prompts and judges.
    `ask` estimates the memory in another process, which imports torch anyway.
    """
    problems, is_local = begun(config, address)
    config, chosen = _typed(config, problems, address)
    problems.attempt(settings.check_run_dir, config)
    config = with_local_models(config)
    check_sampling(config, problems, is_local=is_local)
    objective = _check_settings(config, problems)
    needs = objective.needs if objective else frozenset[str]()
    if problems.are_none:
        looks_good()
    else:  # so that the error does not wait for another process
        ask = asks_nobody
    estimate = asked_memory.asked(config, needs, is_local=is_local, ask=ask)
    formatter = _check_model(config, problems, is_local=is_local)
    if formatter is not None:
        problems.attempt(model.check_shares, config)
        problems.attempt(model.check_heads, config)
        problems.attempt(model.check_biased_tokens, config)
        problems.attempt(settings.check_stops, config, formatter)
        problems.attempt(model.check_quantized_layers, config)
    has_room = formatter is not None and problems.attempt(model.check_room, config, formatter) is not None
    readable = formatter if has_room else None
    source, looks = _check_prompts(config, problems, readable, numbers=objective.columns if objective else ())
    held_out, held_out_looks = _check_held_out(config, problems, readable)
    opened = {"prompts": source, "evaluation.prompts": held_out}
    sources = {field: each for field, each in opened.items() if each is not None}
    played = problems.attempt(environments.check_environments, config, formatter, source)
    models, samples = _check_judges(config, problems, sources, formatter)
    confined = problems.attempt(check_sandboxes, config.reward)
    problems.attempt(machine.check_batch, config, is_local=is_local)
    placement = problems.attempt(machine.place, config, needs, is_local=is_local)
    are_readable = formatter is not None and models is not None  # the files that the estimate reads
    memory = problems.attempt(estimate) if are_readable and (placement or not is_local) else None
    problems.raise_all()
    assert formatter and source is not None and looks and samples is not None and memory, (
        "no problem, so all of it is known"
    )
    return Report(
        rows=(
            *((("model", "computes in", chosen),) if chosen else ()),
            *report.batch_rows(config),
            *report.prompt_rows(config, source, looks),
            *report.held_out_rows(config, source, held_out, held_out_looks),
            *chat.chat_rows(formatter, config.episodes),
            *environments.environment_rows(config, played or {}),
            *(environments.world_rows(config, source, formatter) if plays and config.has_episodes else ()),
            *report.mathematics_rows(config, needs),
            *quantization.overflow_rows(config, is_local=is_local),
            *report.judge_rows(config, samples),
            *server_rows(config.reward),
            *report.reward_model_rows(models or {}),
            *(("reward", f"{field}: programs", text) for field, text in (confined or {}).items()),
            *report.placement_rows(placement),
            *report.memory_rows(memory),
        )
    )


def check_learning(config: RunConfig, *, address: str | None = None) -> "RecordedGroups":
    """As `check`, for a run that learns from recorded trajectories: without judges and rollout workers. Returns the opened trajectories."""
    problems, is_local = begun(config, address)
    config, _ = _typed(config, problems, address)
    problems.attempt(settings.check_run_dir, config)
    config = with_local_models(config)
    objective = _check_settings(config, problems)
    formatter = _check_model(config, problems, is_local=is_local)
    # The learner proves the weights that it publishes on a probe made of the first prompts.
    problems.attempt(open_prompts, config.prompts, field="prompts", source_column=config.reward.source_column)
    needs = objective.needs if objective else frozenset[str]()
    placement = problems.attempt(machine.place, config, needs, is_local=is_local)
    if formatter is not None and (placement or not is_local):
        problems.attempt(machine.estimate, config, needs, is_local=is_local)
    from deploy.recorded import RecordedGroups  # a slow import

    data = problems.attempt(RecordedGroups.of_run, config, objective) if objective and formatter is not None else None
    problems.raise_all()
    assert data is not None, "no problem, so they are opened"
    return data


def check_evaluation(config: RunConfig, *, address: str | None = None) -> None:
    """As `check`, for an evaluation of the model that `config` starts from: without the checks of training."""
    problems, is_local = begun(config, address)
    config, _ = _typed(config, problems, address)
    config = with_local_models(config)
    check_sampling(config, problems, is_local=is_local)
    problems.attempt(settings.check_transport, config)
    problems.attempt(settings.check_weights, config)
    objective = problems.attempt(settings.check_mathematics, config, keeps_inert=True)  # nothing trains
    formatter = _check_model(config, problems, is_local=is_local)
    if formatter is not None:
        problems.attempt(model.check_heads, config)
        problems.attempt(settings.check_stops, config, formatter)
    has_room = formatter is not None and problems.attempt(model.check_room, config, formatter) is not None
    # The engine proves its weights on a probe made of the first prompts.
    problems.attempt(open_prompts, config.prompts, field="prompts", source_column=config.reward.source_column)
    source, _ = _check_held_out(config, problems, formatter if has_room else None)
    problems.attempt(environments.check_environments, config, formatter, source)
    _check_judges(config, problems, {} if source is None else {"evaluation.prompts": source}, formatter)
    problems.attempt(check_sandboxes, config.reward)
    if is_local and objective is not None:
        problems.attempt(plan, config, machine.this_machine(), needs=objective.needs)
    problems.raise_all()


def check_assumed(config: RunConfig, hardware: Hardware) -> Report:
    """Checks settings, placement and memory on hardware that is not at hand. Raises one ConfigError with all problems."""
    problems = Problems()
    model.hush_hub()
    problems.attempt(settings.check_compute_type, config)
    problems.attempt(settings.check_tensor_parallel, config)
    problems.attempt(quantization.check_quantization, config, is_local=False)
    objective = _check_settings(config, problems)
    problems.attempt(model.check_sequence_parallel, config)
    needs = objective.needs if objective else frozenset[str]()
    found = assumed.assume(config, hardware, needs=needs, problems=problems)
    problems.raise_all()
    assert found is not None, "no problem, so all of it is known"
    return Report(
        rows=(*assumed.rows(found, config), *report.batch_rows(config), *report.mathematics_rows(config, needs))
    )


def _typed(config: RunConfig, problems: Problems, address: str | None) -> tuple[RunConfig, str | None]:
    """As `with_compute_type`. If that fails, the other checks go on with bfloat16: the type does not change what they find."""
    return problems.attempt(with_compute_type, config, address=address) or (of_type(config, "bfloat16"), None)


def _check_settings(config: RunConfig, problems: Problems) -> "Objective | None":
    problems.attempt(settings.check_effects, config)
    problems.attempt(settings.check_gpus, config)
    problems.attempt(settings.check_ranks_apart, config)
    problems.attempt(settings.check_transport, config)
    problems.attempt(settings.check_weights, config)
    for index in range(len(config.metrics.sinks)):
        problems.attempt(resolve_sink, config.metrics, index)
    if objective := problems.attempt(settings.check_mathematics, config):
        problems.attempt(settings.check_reference_is_asked, config, needs=objective.needs)
    return objective


def _check_model(config: RunConfig, problems: Problems, *, is_local: bool) -> "ChatFormatter | None":
    """Checks the policy, the reference and the critic's model. Returns the policy's formatter."""
    formatter = problems.attempt(model.formatter_of, config)
    problems.attempt(model.check_reference, config)
    problems.attempt(model.check_critic, config)
    if formatter is not None:
        problems.attempt(model.check_adapters, config)
        problems.attempt(model.check_routing, config)
        problems.attempt(model.check_sequence_parallel, config)
        problems.attempt(model.check_soft_cap, config)
        problems.attempt(prompts.check_demonstrations, config)
    problems.attempt(model.check_attention, config, is_local=is_local)
    problems.attempt(model.check_compiler, config, is_local=is_local)
    return formatter


def _check_prompts(
    config: RunConfig, problems: Problems, formatter: "ChatFormatter | None", *, numbers: Collection[str]
) -> tuple[Mixture | None, Looks | None]:
    """`formatter` None: the lengths of prompts are not checked."""
    source = problems.attempt(open_prompts, config.prompts, field="prompts", source_column=config.reward.source_column)
    if source is None:
        return None, None
    named = {f"sampling.columns.{name}": column for name, column in config.sampling.columns.items()}
    if config.reference.by_source:
        named["reference.source_column"] = config.reference.source_column
    problems.attempt(prompts.check_columns, source, named, config, field="prompts", numbers=numbers)
    if formatter is None:
        return source, None
    asked = (source, formatter, config, config.prompts)
    return source, problems.attempt(prompts.check_lengths, *asked, field="prompts", most=len(source))


def _check_held_out(
    config: RunConfig, problems: Problems, formatter: "ChatFormatter | None"
) -> tuple[Mixture | None, Looks | None]:
    held_out, field = config.evaluation, "evaluation.prompts"
    if held_out.prompts is None:
        return None, None
    source = problems.attempt(open_prompts, held_out.prompts, field=field, source_column=config.reward.source_column)
    if source is None:
        return None, None
    # Not `sampling.columns`: a held-out prompt without a value of its own takes the run's.
    named = {} if held_out.source_column is None else {"evaluation.source_column": held_out.source_column}
    problems.attempt(prompts.check_columns, source, named, config, field=field)
    if formatter is None:
        return source, None
    asked = (source, formatter, config, held_out.prompts)
    return source, problems.attempt(prompts.check_lengths, *asked, field=field, most=held_out.num_prompts)


def _check_judges(
    config: RunConfig, problems: Problems, sources: Mapping[str, Mixture], formatter: "ChatFormatter | None"
) -> "tuple[dict[str, Reading] | None, list[Sample] | None]":
    """Returns the reward models, and the judges' rewards of the first prompts of each source. `sources` are by their setting."""
    for field, each in sources.items():
        problems.attempt(prompts.check_recipes, each, config, field=field)
        problems.attempt(environments.check_named, each, config, field=field)
    sizes = {"prompts": config.buffer.trajectories_per_group, "evaluation.prompts": config.evaluation.num_samples}
    looked = {field: problems.attempt(environments.judged, each, config) for field, each in sources.items()}
    seen = {field: each for field, each in looked.items() if each is not None and len(each)}
    models = problems.attempt(model.readings, config.reward)
    if config.judges_nothing:
        return models, []
    if not sources or models is None:
        return models, None
    trying = (config.reward, seen, formatter)
    return models, problems.attempt(judge.judge_samples, *trying, models=models, group_sizes=sizes)


__all__ = ["Report", "check", "check_assumed", "check_evaluation", "check_learning"]
