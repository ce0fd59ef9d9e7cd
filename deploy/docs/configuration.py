"""docs/configuration.md and the JSON schema: every setting with its default and meaning, from the declarations."""

import inspect
import json
import typing
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from cluster.contracts.config import RunConfig
from cluster.contracts.plugins import Plugin
from cluster.contracts.settings import fields, section_in
from cluster.record.resume_rules import when_it_may_change
from deploy.docs import filled, rows
from learner.algorithms.registry.presets import PRESETS

PRESET = FieldInfo(
    annotation=typing.Literal[*PRESETS],  # pyright: ignore[reportArgumentType]  made at run time
    default=None,
    description="A named bundle of values for the settings below; your own values override them. `docs/algorithms.md` lists each bundle.",
)
"""`algorithm.preset`, a setting of the run file alone: it is expanded before validation."""

_AS_PROMPTS = "evaluation.prompts"
"""A section whose settings are in the table of `prompts`."""


def schema() -> str:
    """JSON schema of a run file, for editors."""
    whole = RunConfig.model_json_schema()
    preset = {"anyOf": [{"enum": list(PRESETS), "type": "string"}, {"type": "null"}], "default": None}
    algorithm = whole["$defs"]["AlgorithmConfig"]
    algorithm["properties"] = {"preset": preset | {"description": PRESET.description}} | algorithm["properties"]
    return json.dumps(whole, indent=1) + "\n"


def configuration() -> str:
    """The page: name, default and meaning of every setting."""
    top = [(name, field) for name, field in fields(RunConfig) if "." not in name and section_in(field) is None]
    sections = [
        (name, field)
        for name, field in fields(RunConfig)
        if section_in(field) is not None and not name.startswith(f"{_AS_PROMPTS}.")
    ]
    parts = [f"## Top level\n\n{_table(top)}", *(_section(name, field) for name, field in sections)]
    return filled("configuration", settings="\n\n".join(parts))


def _section(name: str, field: FieldInfo) -> str:
    section = typing.cast(type[Any], section_in(field))
    names = [key for key, each in section.model_fields.items() if section_in(each) is None and key != "params"]
    own = [(f"{name}.{key}", section.model_fields[key]) for key in names if name != _AS_PROMPTS]
    if name == "algorithm":
        own.insert(0, ("algorithm.preset", PRESET))
    meaning = " ".join((field.description or inspect.cleandoc(section.__doc__ or "")).split())
    absent = "Absent unless given." if field.default is None else ""
    return "\n\n".join(part for part in (f"## `{name}`", meaning, absent, _table(own) if own else "") if part)


def _table(settings: list[tuple[str, FieldInfo]]) -> str:
    head = "| setting | default | on resume | meaning |\n|---|---|---|---|\n"
    return head + rows(
        (f"`{name.rpartition('.')[2]}`", _default(field), when_it_may_change(name), _meaning(field))
        for name, field in settings
    )


def _meaning(field: FieldInfo) -> str:
    kinds = (field.annotation, *typing.get_args(field.annotation))
    literals = [kind for kind in kinds if typing.get_origin(kind) is typing.Literal]
    choices = [repr(choice) for kind in literals for choice in typing.get_args(kind)]
    kind = f"One of {', '.join(choices)}. " if choices else "Variant. " if field.annotation is Plugin else ""
    return kind + " ".join((field.description or "").split())


def _default(field: FieldInfo) -> str:
    shown = field.get_default(call_default_factory=True)
    if shown is PydanticUndefined:
        return "**required**"
    if isinstance(shown, Plugin):
        shown = shown.model_dump()
    if isinstance(shown, tuple):
        shown = [each.model_dump() if isinstance(each, Plugin) else each for each in shown]
    return "none" if shown is None else f"`{json.dumps(shown)}`"
