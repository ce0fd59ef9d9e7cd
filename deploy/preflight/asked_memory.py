"""The machine's memory, looked at by another process: what that takes, torch and transformers' models, is imported there in any case."""

import json
from collections.abc import Callable
from dataclasses import asdict

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from deploy.preflight.machine import Memory, estimate

Ask = Callable[[str, str], Callable[[], str | None]]
"""Takes an import path of a function and a question for it. What comes back waits for the answer: None, where there is none."""


def asks_nobody(function: str, question: str) -> Callable[[], str | None]:
    return lambda: None


def asked(config: RunConfig, needs: frozenset[str], *, is_local: bool, ask: Ask) -> Callable[[], Memory]:
    """As `machine.estimate`, which is called here where nobody answers."""
    written = config.model_dump_json()
    # Actors are forked of what answers: it runs no model's own code. And JSON has no infinite numbers.
    if '"trust_remote_code":true' in written or RunConfig.model_validate_json(written) != config:
        ask = asks_nobody
    answer = ask(f"{__name__}:{answered.__name__}", json.dumps([written, sorted(needs), is_local]))

    def read() -> Memory:
        said = answer()
        if said is None:
            return estimate(config, needs, is_local=is_local)
        memory, refused = json.loads(said)
        if refused is not None:
            raise ConfigError(refused)
        return Memory(**memory)

    return read


def answered(question: str) -> str:
    """In the other process."""
    written, needs, is_local = json.loads(question)
    try:
        memory = estimate(RunConfig.model_validate_json(written), frozenset(needs), is_local=is_local)
    except ConfigError as error:
        return json.dumps([None, str(error)])
    return json.dumps([asdict(memory), None])
