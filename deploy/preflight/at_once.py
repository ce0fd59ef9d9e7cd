"""Checks of a start that take less than a second: wrong settings, found before Ray, torch, transformers or user code is imported.

`check` finds the same problems and more, but takes seconds. One error names all problems.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError, StorageError
from cluster.contracts.plugins import Home, Plugin, refuse_unknown
from cluster.record.run_directory import RunDirectory
from deploy.config.spelling import homes_in
from deploy.preflight import machine, model, quantization, settings
from deploy.preflight.problems import Problems

_OF_SAMPLING = ("environment", "episodes.", "evaluation.", "reward.")
"""Settings that a run that learns from recorded trajectories does not read."""
_OF_STEPS = ("algorithm.sft.", "metrics.")
"""Settings that an evaluation does not read."""
_ALGORITHM = "algorithm."
_SILENT_S = 15.0
"""After so many seconds, a run directory that does not answer is reported."""


def begun(config: RunConfig, address: str | None) -> tuple[Problems, bool]:
    """No problems so far, and whether the run starts its own cluster on this machine. Raises InUseError at once."""
    # No other problem matters while another run has the directory. An unreadable directory is found later, among other problems.
    with contextlib.suppress(StorageError), _told_if_silent(config.run_dir):
        RunDirectory(config.run_dir).refuse_if_busy()
    return Problems(), machine.is_own_cluster(address)


@contextlib.contextmanager
def _told_if_silent(run_dir: str) -> Iterator[None]:
    """Prints a line if the block is not over in time. On a file system that stands still it never is, and Ctrl-C does not end it."""
    line = f"treadwheel: run_dir={run_dir!r} has not answered for {_SILENT_S:g} s: bring its file system back, or name another run_dir"
    timer = threading.Timer(_SILENT_S, print, (line,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_settings(config: RunConfig, *, address: str | None = None) -> None:
    problems, is_local = begun(config, address)
    problems.attempt(RunDirectory(config.run_dir).check_place)
    check_sampling(config, problems, is_local=is_local)
    problems.attempt(settings.check_effects, config)
    problems.attempt(settings.check_gpus, config)
    problems.attempt(settings.check_ranks_apart, config)
    _check_names(config, problems)
    problems.raise_all()


def check_settings_of_learning(config: RunConfig, *, address: str | None = None) -> None:
    problems, _ = begun(config, address)
    problems.attempt(RunDirectory(config.run_dir).check_place)
    problems.attempt(settings.check_effects, config)
    problems.attempt(settings.check_gpus, config)
    problems.attempt(settings.check_ranks_apart, config)
    _check_names(config, problems, unread=_OF_SAMPLING)
    problems.raise_all()


def check_settings_of_evaluation(config: RunConfig, *, address: str | None = None) -> None:
    problems, is_local = begun(config, address)
    check_sampling(config, problems, is_local=is_local)
    _check_names(config, problems, unread=_OF_STEPS)
    problems.raise_all()


def check_sampling(config: RunConfig, problems: Problems, *, is_local: bool) -> None:
    problems.attempt(settings.check_tensor_parallel, config)
    problems.attempt(settings.check_json_schema, config)
    if config.model.dtype != "auto":  # finding that type takes longer
        problems.attempt(quantization.check_quantization, config, is_local=is_local)
    problems.attempt(settings.check_environment, config, is_local=is_local)


def _check_names(config: RunConfig, problems: Problems, *, unread: tuple[str, ...] = ()) -> None:
    """Checks the names of the model, of variants and of their parameters."""
    problems.attempt(settings.check_weights, config)
    for setting, plugin, home in _variants(config):
        if not setting.startswith(unread):
            problems.attempt(_refuse_unknown, plugin, home, setting)
    with contextlib.suppress(OSError):
        if "://" not in config.model.path:
            problems.attempt(model.refuse_absent, config.model.path, field="model.path")


def _refuse_unknown(plugin: Plugin, home: Home, setting: str) -> None:
    """Raises the error that `check` would raise."""
    is_of_algorithm = setting.startswith(_ALGORITHM) and home.package.startswith("learner.algorithms")
    try:
        refuse_unknown(plugin, home=home, field=setting.removeprefix(_ALGORITHM) if is_of_algorithm else setting)
    except ConfigError as error:
        if is_of_algorithm:
            raise ConfigError(f"algorithm: {error}") from error
        raise


def _variants(config: RunConfig) -> Iterator[tuple[str, Plugin, Home]]:
    """The variants that a run names: setting, variant, home."""
    for setting, home in homes_in(config.model_dump(mode="json")).items():
        found = _at(config, setting)
        if isinstance(found, tuple):
            yield from ((f"{setting}[{index}]", each, home) for index, each in enumerate(found))
        elif isinstance(found, Plugin) and found.name:
            yield setting, found, home


def _at(config: RunConfig, setting: str) -> Any:
    """The setting's value; None: its section is absent."""
    value: Any = config
    for key in setting.split("."):
        value = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
    return value
