"""The rows of a run's prompts: their number and digest for the passport, and the refusal to resume with other rows."""

from collections.abc import Iterator, Mapping
from typing import Any

from actors.prompts.rows import RowPrompts
from cluster.contracts.errors import ConfigError
from cluster.record.run_directory import PASSPORT, RunDirectory
from cluster.rollouts.mixture import Mixture


def note_rows(prompts: dict[str, Any], mixture: Mixture) -> None:
    """Adds `num_rows` and `rows_digest` to the settings of each source whose prompts are rows. `prompts` is the settings' section."""
    for name, source in _of_rows(mixture):
        settings = prompts if name is None else prompts["sources"][name]
        settings |= {"num_rows": len(source), "rows_digest": source.digest}


def refuse_other_rows(run_dir: RunDirectory, mixture: Mixture) -> None:
    """Raises ConfigError if rows have changed since the run began: the order of the prompts depends on the number of rows, and a prompt's
    name is its row. Passports of earlier versions do not name the rows."""
    began: Mapping[str, Any] = run_dir.read_json(PASSPORT).get("mathematics", {}).get("prompts", {})
    for name, source in _of_rows(mixture):
        settings = began if name is None else began.get("sources", {}).get(name, {})
        if "rows_digest" not in settings:
            continue
        before, now = (settings["num_rows"], settings["rows_digest"]), (len(source), source.digest)
        if before == now:
            continue
        field = "prompts" if name is None else f"prompts.sources.{name}"
        raise ConfigError(
            f"{field}: {source.path!r} has changed since this run began: {before[0]:,} rows of digest {before[1][:12]} then, {now[0]:,} of "
            f"{now[1][:12]} now; bring the old rows back, or name another run_dir"
        )


def _of_rows(mixture: Mixture) -> Iterator[tuple[str | None, RowPrompts]]:
    for source in mixture.sources:
        if isinstance(source.prompts, RowPrompts):
            yield source.name, source.prompts
