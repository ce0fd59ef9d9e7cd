"""Pages made from the code, so that they cannot go stale: `make docs` writes them, a test compares them."""

import inspect
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from cluster.contracts.config import RunConfig
from cluster.contracts.plugins import Plugin
from cluster.contracts.settings import fields, section_in
from cluster.metrics import METRICS
from cluster.record.resume_rules import when_it_may_change

_NOTE = "<!-- Made by `make docs` from the code; edit the docstrings there. -->"


def pages() -> dict[str, str]:
    """Content by file name below docs/."""
    return {
        "configuration.md": configuration(),
        "config_schema.json": json.dumps(RunConfig.model_json_schema(), indent=1) + "\n",
        "metrics.md": metrics(),
    }


def configuration() -> str:
    """Every setting: name, default, meaning."""
    lines = [
        "# Configuration",
        _NOTE,
        "",
        "A run file is YAML with these sections. Unknown settings are errors. `section.setting=value` on the command line comes last;",
        "`section.setting=null` gives the default back where null is not a value of its own, and `algorithm.preset=ppo` replaces the",
        "file's whole algorithm section.",
        "A setting of kind *variant* is a name (`grpo`) or a mapping of name and parameters (`{name: grpo, epsilon: 1e-6}`); your own",
        "go by import path (`my_package.rewards:judge`). `docs/config_schema.json` is the JSON schema, for editors. The column",
        "*on resume* says whether a resumed run may change the setting: see [resuming](resuming.md).",
    ]
    top = [(name, field) for name, field in fields(RunConfig) if "." not in name and section_in(field) is None]
    sections = [(name, field) for name, field in fields(RunConfig) if section_in(field) is not None]
    lines += ["", "## Top level", "", *_table(top)]
    for name, field in sections:
        section = typing.cast(type[Any], section_in(field))
        own = [(f"{name}.{key}", each) for key, each in section.model_fields.items() if section_in(each) is None]
        lines += ["", f"## `{name}`", ""]
        if meaning := field.description or _docstring(section):
            lines += [" ".join(meaning.split()), ""]
        if field.default is None:
            lines += ["Absent unless given.", ""]
        lines += _table(own)
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """Every metric name: the cluster's, and the learner's."""
    from learner.algorithms.statistics import DERIVED, OF_THE_LEARNER, QUANTITIES

    lines = [
        "# Metrics",
        _NOTE,
        "",
        "One line a step in `metrics.jsonl`, under the same names in TensorBoard and, with underscores and",
    ]
    lines += [
        "`ray_treadwheel_` in front, in Prometheus.",
        "",
        "## Of the cluster",
        "",
        "| name | meaning |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in METRICS.items()]
    lines += ["", "## Of the learner", "", "| name | meaning |", "|---|---|"]
    for name, (kinds, meaning) in QUANTITIES.items():
        shown = ", ".join(
            f"`learner/{name}`" if kind in ("total", "share") else f"`learner/{name}_{kind}`" for kind in kinds
        )
        lines.append(f"| {shown} | {_cell(meaning)} |")
    lines += [f"| `learner/{name}` | {_cell(meaning)} |" for name, meaning in {**DERIVED, **OF_THE_LEARNER}.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    folder = Path("docs")
    folder.mkdir(exist_ok=True)
    for name, content in pages().items():
        (folder / name).write_text(content, encoding="utf-8")
        print(f"docs/{name}")


def _table(rows: list[tuple[str, FieldInfo]]) -> Iterator[str]:
    yield "| setting | default | on resume | meaning |"
    yield "|---|---|---|---|"
    for name, field in rows:
        shown = (f"`{name.rpartition('.')[2]}`", _default(field), when_it_may_change(name), _cell(_meaning(field)))
        yield f"| {' | '.join(shown)} |"


def _meaning(field: FieldInfo) -> str:
    choices = [
        repr(choice)
        for kind in _kinds(field.annotation)
        for choice in (typing.get_args(kind) if _is_choice(kind) else ())
    ]
    kind = f"One of {', '.join(choices)}. " if choices else "Variant. " if field.annotation is Plugin else ""
    return kind + " ".join((field.description or "").split())


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return (annotation,) if _is_choice(annotation) else typing.get_args(annotation)


def _is_choice(kind: Any) -> bool:
    return typing.get_origin(kind) is typing.Literal


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "**required**"
    shown = field.default
    if isinstance(shown, Plugin):
        shown = shown.model_dump()
    if isinstance(shown, tuple):
        shown = [each.model_dump() if isinstance(each, Plugin) else each for each in shown]
    return "none" if shown is None else f"`{json.dumps(shown)}`"


def _docstring(section: type[Any]) -> str:
    return inspect.cleandoc(section.__doc__ or "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
