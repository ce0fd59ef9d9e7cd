"""`treadwheel view --export`: a step's groups and trajectories, down to the token, as one HTML file that opens offline.

Style, scripts and data are inside the file, and its content security policy allows only these, by their digests.
"""

import html
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.exceptions import HTTPException

from actors.writable import writable
from cluster.contracts.errors import ConfigError
from cluster.record.run_directory import RunDirectory
from deploy.viewer.page import HERE
from deploy.viewer.pages.group import group_data
from deploy.viewer.pages.trajectory import TokensOfStep
from deploy.viewer.runs import Run
from deploy.viewer.safety import source
from deploy.viewer.steps import Group, open_step, recorded_steps
from deploy.whole_files import write_whole

_MOST_TOKENS = 400_000
"""In one file, about 60 bytes each."""
_MODULES = ("words", "measures", "prompts", "turns", "tokens", "views", "exported")
"""Each module imports only from modules before it."""
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:function|class|const) (\w+))", re.MULTILINE)


def export(run_dir: str, *, step: int | None, file: str) -> str:
    """Writes `file` and returns a sentence about its content. The default `step` is the last recorded one.

    Raises ConfigError if the step has no trajectories, StorageError if the file cannot be written.
    """
    directory = RunDirectory(run_dir)
    directory.reach()
    run = Run(directory.name, directory)
    steps = recorded_steps(run)
    chosen = step if step is not None else steps[-1] if steps else 0
    try:
        data = _data(run, chosen)
    except HTTPException as error:
        raise ConfigError(f"{run_dir}: {error.detail}") from error
    write_whole(file, writable(_page(data, title=f"Step {chosen} of {run.name}")), option="--export")
    num_trajectories = sum(len(group["trajectories"]) for group in data["groups"])
    left_out = f"; {data['num_left_out']} groups left out" if data["num_left_out"] else ""
    return f"step {chosen} of {run.name}: {len(data['groups'])} groups, {num_trajectories} trajectories in {file}{left_out}"


def _data(run: Run, number: int) -> dict[str, Any]:
    step = open_step(run, number)
    tokens = TokensOfStep(run, step)
    tickets = list(_that_fit(step.groups()))
    groups = [group_data(step, ticket) for ticket in tickets]
    for before, group, after in zip([None, *tickets], groups, [*tickets[1:], None], strict=False):
        samples = [each["sample_index"] for each in group["trajectories"]]
        of_samples = {each: tokens.of(group["ticket"], each) for each in samples}
        group |= {"before": before, "after": after, "tokens": of_samples}
    return {"run": run.name, "step": number, "groups": groups, "num_left_out": len(step.tickets) - len(tickets)}


def _that_fit(groups: Sequence[Group]) -> Iterator[int]:
    """Tickets of the first groups, as many as fit into a file, at least one."""
    num_tokens = 0
    for group in groups:
        if num_tokens > _MOST_TOKENS:
            return
        num_tokens += sum(each.num_tokens for each in group.trajectories)
        yield group.ticket_index


def _page(data: dict[str, Any], *, title: str) -> str:
    style = "\n".join((HERE / f"static/{name}.css").read_text(encoding="utf-8") for name in ("style", "tokens"))
    script = "\n".join(_module(name) for name in _MODULES)
    policy = f"default-src 'none'; script-src {source(script)}; style-src {source(style)}; base-uri 'none'; form-action 'none'"
    content = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)} · treadwheel</title>
<style>{style}</style>
<script type="application/json" id="data">{content}</script>
</head>
<body>
<header class="top"><span class="brand">treadwheel</span><a class="run-name" href="#">{html.escape(title)}</a></header>
<main id="main"><div class="stack" id="view"></div></main>
<script type="module">{script}</script>
</body>
</html>
"""


def _module(name: str) -> str:
    """A module of static/ as a function, since browsers forbid imports between local files."""
    text = (HERE / f"static/{name}.js").read_text(encoding="utf-8")
    names = ", ".join(_EXPORT.findall(text))
    body = _EXPORT.sub("", _IMPORT.sub(r"const \1 = \2;", text))
    return f"const {name} = (() => {{\n{body}\nreturn {{ {names} }};\n}})();"
