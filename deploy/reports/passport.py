"""passport.json: what a run computes, down to the last epsilon, and with which versions of packages. Written once, before step 1."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import to_jsonable_python

from cluster.contracts.config import RunConfig
from cluster.contracts.hiding import hidden
from cluster.contracts.settings import Mark, in_words
from cluster.record.resume_rules import mark_of, without_folder
from cluster.record.run_directory import PASSPORT, RunDirectory
from cluster.rollouts.mixture import Mixture
from deploy.config.spelling import spelled_out
from deploy.named_files import named_files, own_code
from deploy.prompt_rows import note_rows
from deploy.versions import versions


def write_passport(
    run_dir: RunDirectory,
    config: RunConfig,
    *,
    formula: dict[str, Any],
    learner: dict[str, str],
    weights_digest: str,
    prompts: Mixture | None = None,
) -> None:
    """`weights_digest` is that of the first published manifest: a digest of the tensors, however they are split over files. `prompts`: the
    opened prompts; None for a run that samples none."""
    run = config.model_dump(mode="json")
    formula = formula | _demonstrations(run)
    del run["algorithm"]  # the formula resolves that section
    settings = _mathematical(_with_defaults(run), run)
    if rows := without_folder(config.prompts.params.get("path")):
        settings["prompts"]["path"] = rows
    if prompts is not None:
        note_rows(settings["prompts"], prompts)
    settings["model"] |= {"weights_digest": weights_digest}
    passport = {
        "mathematics": formula | settings,
        "learner": learner,
        "versions": versions(),
    }
    for files in named_files(config):
        passport = _with(passport, files.place, files.digest)
    if code := own_code(config):
        passport = _with(passport, ("files", "code"), code)
    passport["mathematics"] = hidden(passport["mathematics"])
    run_dir.write_json(PASSPORT, in_words(passport))


def _with(tree: Mapping[str, Any], place: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy of nested mappings with `value` at `place`."""
    key, *rest = place
    return {**tree, key: _with(tree.get(key, {}), rest, value) if rest else value}


def _with_defaults(run: Mapping[str, Any]) -> dict[str, Any]:
    """Judges, prompts and environments with all their parameters: two spellings of one setting are equal, and a default that differs
    between versions shows. A value that JSON does not know is named by its type, since its text may vary from process to process."""
    return to_jsonable_python(
        spelled_out(run), fallback=lambda value: f"{type(value).__module__}.{type(value).__name__}"
    )


def _demonstrations(run: Mapping[str, Any]) -> dict[str, Any]:
    sft = run["algorithm"]["sft"]
    return {"sft": _with_defaults({"algorithm": {"sft": sft}})["algorithm"]["sft"]} if sft else {}


def is_mathematical(name: str) -> bool:
    """Whether an entry of a passport, by its full name, belongs to the mathematics of the run."""
    return name.startswith("mathematics.")


def _mathematical(settings: Mapping[str, Any], run: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The mathematical settings of `run` or of one of its sections."""
    kept: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            if inner := _mathematical(value, run, f"{name}."):
                kept[key] = inner
        elif mark_of(name, run) is Mark.MATHEMATICS:
            kept[key] = value
    return kept
