"""`model.dtype: auto`: chooses the type that the machine multiplies fast. A resumed run keeps the type that it began with."""

import functools
import subprocess
import sys

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from cluster.record.run_directory import RUN_YAML, RunDirectory
from deploy.config.written import settings_in
from deploy.preflight.machine import is_own_cluster

_TYPES = ("float32", "bfloat16")
_ASK_S = 120.0
"""Time limit of the question to the GPUs."""


def with_compute_type(config: RunConfig, *, address: str | None) -> tuple[RunConfig, str | None]:
    """(the run with a type to compute in, the reason for it). The reason is None if the run file names the type.

    Raises ConfigError for `auto` on a running cluster: its nodes cannot be asked from here.
    """
    if config.model.dtype != "auto":
        return config, None
    if (dtype := _begun_with(config.run_dir)) is not None:
        return of_type(config, dtype), f"{dtype}, with which the run in {config.run_dir!r} began (model.dtype=auto)"
    if not is_own_cluster(address):
        raise ConfigError(
            "model.dtype='auto' on a running cluster: its nodes cannot be asked before the run is placed; write model.dtype=bfloat16 if "
            "learner and engines have GPUs of compute capability 8 or more, or processors with AMX (from AMD: AVX512-BF16), else float32"
        )
    slow = [each for each in (_slow_processor(config), _slow_gpus(config)) if each is not None]
    dtype, why = ("float32", " and ".join(slow)) if slow else ("bfloat16", "which this machine multiplies fast")
    return of_type(config, dtype), f"{dtype}, {why} (model.dtype=auto)"


def of_type(config: RunConfig, dtype: str) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


def _begun_with(run_dir: str) -> str | None:
    """The type in run.yaml; None: no run has begun. Raises ConfigError for a damaged file."""
    directory = RunDirectory(run_dir)
    if not directory.exists(RUN_YAML):
        return None
    model = settings_in(directory).get("model")
    dtype = model.get("dtype") if isinstance(model, dict) else None
    return dtype if dtype in _TYPES else None


def _slow_processor(config: RunConfig) -> str | None:
    """Why the processor should not compute in bfloat16. None: it does so fast, or it computes nothing of the model."""
    from learner.model.compute_type import is_bfloat16_fast_on_cpu

    on_cpu = config.learner.gpus_per_rank == 0 or (config.recorded is None and config.rollout.gpus_per_worker == 0)
    return (
        "since the processor, without AMX, multiplies float32 faster"
        if on_cpu and not is_bfloat16_fast_on_cpu()
        else None
    )


def _slow_gpus(config: RunConfig) -> str | None:
    """As `_slow_processor`."""
    on_gpus = config.learner.gpus_per_rank > 0 or (config.recorded is None and config.rollout.gpus_per_worker > 0)
    return "since a GPU is of compute capability below 8" if on_gpus and not _are_gpus_fast() else None


def _are_gpus_fast() -> bool:
    try:
        return asked_of_gpus("is_bfloat16_fast_on_gpus")
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"model.dtype='auto': the GPUs cannot be asked ({error}); write bfloat16 or float32"
        ) from error


@functools.cache  # preflight asks, and then the run
def asked_of_gpus(question: str) -> bool:
    """The answer of the function `question` of `learner.model.compute_type`. Raises OSError or SubprocessError without an answer."""
    # In another process: the driver would hold memory of the GPU as long as it lives.
    ask = f"from learner.model.compute_type import {question} as asked; print(asked())"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=_ASK_S, check=True)
    return done.stdout.split()[-1:] == ["True"]
