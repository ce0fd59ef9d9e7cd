"""`treadwheel eval`: held-out scores of a run file's starting model, a run's last checkpoint, or one checkpoint."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.hiding import hidden
from cluster.contracts.settings import Mark, differences, flat
from cluster.record.resume_rules import are_one_place, is_of_another_variant, mark_of
from cluster.record.run_directory import CHECKPOINT_MANIFEST, CHECKPOINTS, RUN_YAML, RunDirectory
from cluster.record.storage import Storage
from deploy.config import loading as configuration
from deploy.config.spelling import spelled_out
from deploy.config.yaml_text import flow
from deploy.reports import run_info

_RATING = ("environment", "episodes", "evaluation", "reward", "sampling")
"""Beginnings of the settings that change a score of the same model."""


def check(config: RunConfig, *, address: str | None = None) -> None:
    """Raises one ConfigError with all reasons why `config` cannot be evaluated."""
    from deploy import preflight
    from deploy.preflight.at_once import check_settings_of_evaluation

    check_settings_of_evaluation(config, address=address)
    preflight.check_evaluation(config, address=address)


@contextlib.contextmanager
def configured(target: str, overrides: Sequence[str] = ()) -> Iterator[RunConfig]:
    """The target's configuration, with the model to evaluate and a run directory of its own. Raises ConfigError when `target` holds nothing
    to evaluate."""
    with tempfile.TemporaryDirectory() as scratch:
        config = _config_of(target, overrides, run_dir=scratch)
        if config.evaluation.prompts is None:
            raise ConfigError(
                f"{target!r} has no evaluation.prompts; name a held-out source: evaluation.prompts='{{name: file, path: ...}}'"
            )
        yield config


def _config_of(target: str, overrides: Sequence[str], *, run_dir: str) -> RunConfig:
    own = [f"run_dir={flow(run_dir)}"]
    if target.endswith((".yaml", ".yml")):
        return configuration.load(target, [*overrides, *own])
    run, checkpoint = _run_and_checkpoint(target)
    _forbid_other_weights(target, overrides)
    config = run_info.config_of(run, [*overrides, *own, f"model.path={flow(str(checkpoint))}"])
    configuration.refuse_hidden(config, source=run.path(RUN_YAML))
    return config


def _forbid_other_weights(target: str, overrides: Sequence[str]) -> None:
    for override in overrides:
        name, value = configuration.parsed(override)
        if name in ("model.path", "model.revision") or (
            name == "model" and isinstance(value, dict) and "path" in value
        ):
            raise ConfigError(
                f"override {hidden(override)!r} names other weights than those of {target!r}, which are evaluated; leave it out, or "
                "use it with a run file"
            )


def warnings(named: Mapping[str, RunConfig]) -> list[str]:
    """A line for each target whose scores are not comparable with the first one's, with the settings that differ."""
    first, *others = named
    rated = {target: _rating(config) for target, config in named.items()}
    lines: list[str] = []
    for other in others:
        found = differences(rated[first], rated[other])
        if settings := [name for name, values in found.items() if not _is_the_same(name, values, found)]:
            differ = ", ".join(settings)
            lines.append(f"warning: the scores of {first} and {other} are not comparable: they differ in {differ}")
    return lines


def _is_the_same(name: str, values: tuple[Any, Any], found: Mapping[str, Any]) -> bool:
    """Whether a difference needs no word: one file in two spellings, or a parameter of a variant that differs itself."""
    return are_one_place(*values) or is_of_another_variant(name, found)


def _rating(config: RunConfig) -> dict[str, Any]:
    """The settings that change the scores, by full name."""
    run = config.model_dump(mode="json")
    return {
        name: value
        for name, value in flat(spelled_out(run))
        if name.startswith(_RATING)
        and name != "evaluation.every_steps"
        and (name.startswith("evaluation") or mark_of(name, run) is Mark.MATHEMATICS)
    }


def print_scores(target: str, scores: Mapping[str, Any]) -> None:
    print(f"{target}: " + "  ".join(f"{name} {_shown(value)}" for name, value in sorted(scores.items())))


def _shown(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.4g}"


def _run_and_checkpoint(target: str) -> tuple[RunDirectory, str]:
    """The last checkpoint of a run directory, or the checkpoint that `target` names: `RUN_DIR/checkpoints/step-000010`."""
    if RunDirectory(target).exists(RUN_YAML):
        run = RunDirectory(target)
        saved = run.checkpoints()
        if not saved:
            raise ConfigError(f"{target!r} has no checkpoint yet; evaluate its run file instead")
        checkpoint = run.path(f"{CHECKPOINTS}/{saved[max(saved)]}")
    else:
        checkpoint = target.rstrip("/") if "://" in target else os.path.abspath(target)
        run = RunDirectory(os.path.dirname(os.path.dirname(checkpoint)))
        if not run.exists(RUN_YAML):
            raise ConfigError(
                f"{target!r} is neither a run file (.yaml), nor a run directory, nor a checkpoint inside one"
            )
    whole = Storage(checkpoint)
    # In an object store the manifest names the folder of the model's files.
    if whole.is_local and not whole.names("model"):
        raise ConfigError(f"{checkpoint!r} has no model folder; name a whole checkpoint")
    if not whole.exists(CHECKPOINT_MANIFEST):
        raise ConfigError(
            f"{checkpoint!r} has no {CHECKPOINT_MANIFEST}: it was never finished, or copied in part; name a whole one"
        )
    return run, f"{checkpoint}/model"
