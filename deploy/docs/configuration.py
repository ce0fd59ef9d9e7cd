"""docs/configuration.md and the JSON schema: every setting with its default and meaning, from the declarations."""

import inspect
import json
import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from cluster.contracts.config import RunConfig
from cluster.contracts.plugins import Plugin
from cluster.contracts.settings import fields, section_in
from cluster.record.resume_rules import when_it_may_change
from deploy.docs import NOTE, cell
from learner.algorithms.registry.presets import PRESETS

PRESET = FieldInfo(
    annotation=typing.Literal[*PRESETS],  # pyright: ignore[reportArgumentType]  made at run time
    default=None,
    description="A named bundle of the settings below, which those that you give override; `docs/algorithms.md` has what each stands for.",
)
"""`algorithm.preset`, which a run file may have and a validated configuration has not: it is expanded before."""


_INTRODUCTION = f"""\
# Configuration
{NOTE}

A run file is YAML with these sections. Unknown settings are errors. `section.setting=value` on the command line comes last;
`section.setting=null` gives the default back where null is not a value of its own, and `algorithm.preset=ppo` replaces the file's whole
algorithm section. A setting of kind *variant* is a name (`grpo`) or a mapping of name and parameters (`{{name: grpo, epsilon: 1e-6}}`);
your own go by full path (`my_package.rewards:judge`). All names: [variants](variants.md), [algorithms](algorithms.md), `treadwheel list`.
The column *on resume* says whether a resumed run may change the setting: see [resuming](resuming.md). `docs/config_schema.json` is the
JSON schema, for editors."""


def schema() -> str:
    """JSON schema of a run file, for editors."""
    whole = RunConfig.model_json_schema()
    preset = {"anyOf": [{"enum": list(PRESETS), "type": "string"}, {"type": "null"}], "default": None}
    algorithm = whole["$defs"]["AlgorithmConfig"]
    algorithm["properties"] = {"preset": preset | {"description": PRESET.description}} | algorithm["properties"]
    return json.dumps(whole, indent=1) + "\n"


def configuration() -> str:
    """Every setting: name, default, meaning."""
    lines = [_INTRODUCTION]
    top = [(name, field) for name, field in fields(RunConfig) if "." not in name and section_in(field) is None]
    sections = [(name, field) for name, field in fields(RunConfig) if section_in(field) is not None]
    lines += ["", "## Top level", "", *_table(top)]
    for name, field in sections:
        section = typing.cast(type[Any], section_in(field))
        own = [(f"{name}.{key}", each) for key, each in section.model_fields.items() if section_in(each) is None]
        own = [("algorithm.preset", PRESET), *own] if name == "algorithm" else own
        lines += ["", f"## `{name}`", ""]
        if meaning := field.description or _docstring(section):
            lines += [" ".join(meaning.split()), ""]
        if field.default is None:
            lines += ["Absent unless given.", ""]
        lines += _table(own)
    return "\n".join(lines) + "\n"


def _table(rows: list[tuple[str, FieldInfo]]) -> Iterator[str]:
    yield "| setting | default | on resume | meaning |"
    yield "|---|---|---|---|"
    for name, field in rows:
        shown = (f"`{name.rpartition('.')[2]}`", _default(field), when_it_may_change(name), cell(_meaning(field)))
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
    shown = field.get_default(call_default_factory=True)
    if shown is PydanticUndefined:
        return "**required**"
    if isinstance(shown, Plugin):
        shown = shown.model_dump()
    if isinstance(shown, tuple):
        shown = [each.model_dump() if isinstance(each, Plugin) else each for each in shown]
    return "none" if shown is None else f"`{json.dumps(shown)}`"


def _docstring(section: type[Any]) -> str:
    return inspect.cleandoc(section.__doc__ or "")
