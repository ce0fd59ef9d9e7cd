"""Estimates the run's memory in another process, which imports torch and transformers anyway, so that this one need not."""

import json
from collections.abc import Callable
from dataclasses import asdict

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from deploy.preflight.machine import Memory, estimate

Ask = Callable[[str, str], Callable[[], str | None]]
"""(import path of a function, question for it) to a function that waits for the answer; the answer None means that nobody answered."""


def asks_nobody(function: str, question: str) -> Callable[[], str | None]:
    return lambda: None


def asked(config: RunConfig, needs: frozenset[str], *, is_local: bool, ask: Ask) -> Callable[[], Memory]:
    """A function with the result of `machine.estimate`. It computes the estimate itself if nobody answers."""
    written = config.model_dump_json()
    # Actors are forked from the answering process, so it must not run a model's own code. And JSON has no infinite numbers.
    if '"trust_remote_code":true' in written or RunConfig.model_validate_json(written) != config:
        ask = asks_nobody
    answer = ask(f"{__name__}:{answered.__name__}", json.dumps([written, sorted(needs), is_local]))

    def read() -> Memory:
        if (text := answer()) is None:
            return estimate(config, needs, is_local=is_local)
        memory, problem = json.loads(text)
        if problem is not None:
            raise ConfigError(problem)
        return Memory(**memory)

    return read


def answered(question: str) -> str:
    """Answers in the other process."""
    written, needs, is_local = json.loads(question)
    try:
        memory = estimate(RunConfig.model_validate_json(written), frozenset(needs), is_local=is_local)
    except ConfigError as error:
        return json.dumps([None, str(error)])
    return json.dumps([asdict(memory), None])
