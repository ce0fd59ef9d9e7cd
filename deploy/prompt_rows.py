"""A run's prompts: their number and, of rows, their digest for the passport, and the refusal to resume with others."""

from collections.abc import Mapping
from typing import Any

from actors.prompts.rows import RowPrompts
from cluster.contracts.errors import ConfigError
from cluster.contracts.protocols import PromptSource
from cluster.record.run_directory import PASSPORT, RunDirectory
from cluster.rollouts.mixture import Mixture


def note_rows(prompts: dict[str, Any], mixture: Mixture) -> None:
    """Adds `num_rows`, and `rows_digest` if its prompts are rows, to the settings of each source. `prompts` is the settings' section."""
    for source in mixture.sources:
        settings = prompts if source.name is None else prompts["sources"][source.name]
        settings |= _noted(source.prompts)


def refuse_other_rows(run_dir: RunDirectory, mixture: Mixture) -> None:
    """Raises ConfigError if prompts have changed since the run began: their order depends on their number, and a prompt's name is its row.
    Passports of earlier versions do not name all of it."""
    began: Mapping[str, Any] = run_dir.read_json(PASSPORT).get("mathematics", {}).get("prompts", {})
    for source in mixture.sources:
        settings = began if source.name is None else began.get("sources", {}).get(source.name, {})
        field = "prompts" if source.name is None else f"prompts.sources.{source.name}"
        now = _noted(source.prompts)
        before = {name: settings.get(name, value) for name, value in now.items()}
        if before == now:
            continue
        if isinstance(source.prompts, RowPrompts):
            raise ConfigError(
                f"{field}: {source.prompts.path!r} has changed since this run began: {before['num_rows']:,} rows of digest "
                f"{before['rows_digest'][:12]} then, {now['num_rows']:,} of {now['rows_digest'][:12]} now; bring the old rows back, or "
                "name another run_dir"
            )
        raise ConfigError(
            f"{field}: another number of prompts than when this run began: {before['num_rows']:,} then, "
            f"{now['num_rows']:,} now; bring the old ones back, or name another run_dir"
        )


def _noted(prompts: PromptSource) -> dict[str, Any]:
    digest = {"rows_digest": prompts.digest} if isinstance(prompts, RowPrompts) else {}
    return {"num_rows": len(prompts)} | digest
