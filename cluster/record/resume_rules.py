"""Settings that a resumed run may change. The mark in a setting's declaration decides."""

import hashlib
import os
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.hiding import HIDDEN
from cluster.contracts.settings import Mark, differences, flat, marks

_MARKS = dict(marks(RunConfig))
_NAME_OF_A_PART = re.compile(r"^(reward\.(?:parts|models|servers)\.)[^.]+\.")
_ROWS = re.compile(r"(?:.*/)?(prompts-[0-9a-f]{12}\.jsonl)")
_WHEN = {Mark.MATHEMATICS: "no", Mark.LAYOUT: "unless deterministic", Mark.RESOURCES: "yes"}
_OF_DIGESTS = ("model.attention", "weights.bucket_bytes", "weights.transport")
"""Settings beside the learner's that change the digest of published weights."""
_SPECIAL = {
    "num_steps": "with a constant schedule",
    "prompts.max_prompt_tokens": "upwards, from `error`",
    "prompts.on_long_prompt": "from `error`",
}


def when_it_may_change(name: str) -> str:
    """Whether a resumed run may have another value of the setting `name`, as text for a table."""
    return _SPECIAL.get(name) or _WHEN[mark_of(name, {})]


def mark_of(name: str, run: Mapping[str, Any]) -> Mark:
    """Mark of a setting of `run`, or of a variant's parameter (`reward.judge.pattern`). Names of other versions count as mathematics."""
    if name == "num_steps" and run.get("optimizer", {}).get("schedule", "constant") != "constant":
        return Mark.MATHEMATICS  # a schedule that ends with the run gives its past steps other learning rates
    name = _NAME_OF_A_PART.sub(r"\1", name)
    while name:
        if mark := _MARKS.get(name):
            return mark
        name = name.rpartition(".")[0]
    return Mark.MATHEMATICS


def rows_named(content: bytes) -> str:
    """Name of the file with the prompts that a script gave as rows."""
    return f"prompts-{hashlib.sha256(content).hexdigest()[:12]}.jsonl"


def without_folder(path: object) -> str | None:
    """The name of a file of such rows, which says its content; None for any other value."""
    match = _ROWS.fullmatch(path) if isinstance(path, str) else None
    return match and match[1]


def with_new_settings(written: Mapping[str, Any]) -> Mapping[str, Any]:
    """A run's settings, with the defaults of those that its version did not have yet. As they are, if this version refuses them."""
    try:
        return RunConfig.model_validate(written).model_dump(mode="json")
    except ValidationError:
        return written


def differing(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that make two resolved configurations different runs: name -> (theirs, ours)."""
    found = differences(theirs, ours)
    return {
        name: values
        for name, values in found.items()
        if not is_of_another_variant(name, found)
        and not _may_change(name, theirs)
        and not _lets_long_prompts_pass(name, theirs, *values)
        and not are_one_place(*values)
        and not _is_shown_now(*values)
    }


def moved(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Changed settings that a run may change, and after which a step's weights may have another digest: name -> (theirs, ours)."""
    return {
        name: values
        for name, values in differences(theirs, ours).items()
        if name.startswith(_OF_DIGESTS) or (name.startswith("learner.") and mark_of(name, theirs) is Mark.LAYOUT)
    }


def check_same_run(theirs: Mapping[str, Any], ours: Mapping[str, Any], *, run_dir: str) -> None:
    """Raises ConfigError with every setting that a resumed run would change and may not."""
    changed: list[str] = []
    for name, (was, now) in differing(theirs, ours).items():
        why = " (fixed by deterministic=true)" if mark_of(name, theirs) is Mark.LAYOUT else ""
        if name == "num_steps":
            why = f" (fixed by optimizer.schedule={theirs['optimizer']['schedule']})"
        changed.append(f"{name} is {was!r} there and {now!r} here{why}")
    belongs = f"run_dir={run_dir!r} belongs to another configuration: "
    if len(changed) == 1:
        raise ConfigError(f"{belongs}{changed[0]}; name another run_dir, or set it back to resume that run")
    if changed:
        why = f"{len(changed)} settings differ that a resumed run may not change"
        out = "name another run_dir, or set them back to resume that run"
        raise ConfigError("\n  ".join([f"{belongs}{why}; {out}", *changed]))


def _may_change(name: str, theirs: Mapping[str, Any]) -> bool:
    mark = mark_of(name, theirs)
    return mark is Mark.RESOURCES or (mark is Mark.LAYOUT and not theirs.get("deterministic", False))


def _lets_long_prompts_pass(name: str, theirs: Mapping[str, Any], was: Any, now: Any) -> bool:
    """Whether it is a way out for a run that a long prompt ended. A run with `error` has learned from no longer prompt than its limit."""
    if dict(flat(theirs)).get("prompts.on_long_prompt", "error") != "error":
        return False
    is_raised = was is not None and (now is None or now > was)
    return name == "prompts.on_long_prompt" or (name == "prompts.max_prompt_tokens" and is_raised)


def are_one_place(was: Any, now: Any) -> bool:
    """Whether both are paths to the same file or folder, and it exists: `model` and `/home/me/model`. Files of equal rows are the same."""
    if (rows := without_folder(was)) is not None and rows == without_folder(now):
        return True
    if not isinstance(was, str) or not isinstance(now, str) or "/" not in was + now:
        return False
    first, second = (os.path.realpath(os.path.expanduser(each)) for each in (was, now))
    return first == second and os.path.exists(first)


def _is_shown_now(was: Any, now: Any) -> bool:
    """Whether an earlier version hid a value that is no secret, which cannot be compared."""
    return was == HIDDEN and now is not None


def is_of_another_variant(name: str, found: Mapping[str, Any]) -> bool:
    """Whether it is a parameter of a variant whose `name` differs too."""
    variant = f"{name.rpartition('.')[0]}.name"
    return name != variant and variant in found
