"""report.html: a run in one file, to keep and to send. It needs no network, server or script, and shows a model's output only as text.

Contents: configuration, in words and in full; curves; samples before and after; failures and restarts; time; passport; next commands.
"""

import contextlib
import functools
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

from actors.writable import writable
from cluster.contracts.config import RunConfig
from cluster.contracts.hiding import hidden
from cluster.record.run_directory import CURVES, EVENTS, PASSPORT, REPORT, RUN_YAML, RunDirectory
from cluster.sinks.jsonl import read_lines
from deploy.config.yaml_text import dumped, flow
from deploy.reports import curves
from deploy.reports.costs import costs
from deploy.reports.drawing import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, drawing
from deploy.reports.panels import marks, panels, steps_of
from deploy.reports.provenance import digest_of
from deploy.reports.run_info import config_of, failed_rewards, left_parts
from deploy.reports.samples import NUM_COMPLETIONS, samples
from deploy.reports.summary import summary_of
from deploy.viewer import fleet
from deploy.viewer.page import HERE as VIEWER
from deploy.viewer.page import number, templates
from deploy.viewer.safety import source
from deploy.whole_files import write_whole
from learner.checkpoint.card import in_words

_HERE = Path(__file__).parent
_STYLES = (VIEWER / "static" / "style.css", _HERE / "report.css")
"""The viewer's styles, then those of a report."""
_MOST_EVENTS = 100
_ALSO_SHOWN = ("resumed", "stopping", "stopped", "preempted", "worker_left", "scale")
"""Kinds of events that are listed in addition to failures and recoveries."""


def leave(directory: RunDirectory) -> None:
    """Writes curves and report at the end of a run, however it ends. An error is a line on standard error and never fails the run."""
    steps = functools.cache(lambda: read_lines(directory))
    makes = ((CURVES, lambda: curves.draw(directory, steps())), (REPORT, lambda: _write(directory, steps())))
    for name, make in makes:
        try:
            directory.check_claim()
            if steps():
                make()
        except Exception as error:  # noqa: BLE001  a run that has learned is not lost for a page about it
            with contextlib.suppress(OSError, ValueError):  # standard error may be closed
                line = f"treadwheel: {name} was not written: {type(error).__name__}: {error}"
                print(line, file=sys.stderr, flush=True)


def write(directory: RunDirectory, out: str | None = None) -> str:
    """Writes the report into the run directory or to `out`, and returns its path. Raises ConfigError if there is no run."""
    if out is None:
        return _write(directory)
    write_whole(out, html(directory), option="--out")
    return out


def _write(directory: RunDirectory, steps: Sequence[Mapping[str, Any]] | None = None) -> str:
    directory.write_file(REPORT, html(directory, steps).encode())
    return directory.path(REPORT)


def html(directory: RunDirectory, steps: Sequence[Mapping[str, Any]] | None = None) -> str:
    """The whole page. `steps` are the lines of metrics.jsonl, if they were read already. Raises ConfigError when there is no run."""
    config = config_of(directory)
    style = "\n".join(path.read_text(encoding="utf-8") for path in _STYLES)
    template = _environment().get_template("report.html")
    return writable(template.render(style=style, style_source=source(style), **_content(directory, config, steps)))


def _content(directory: RunDirectory, config: RunConfig, steps: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    # Asked before the events are read: a driver that ends meanwhile has logged its end by then.
    owner = directory.owner()
    # An error of a judge or server may quote the URL or header of its request.
    events = fleet.versioned(hidden(directory.read_json_lines(EVENTS)))
    steps = read_lines(directory) if steps is None else steps
    passport = directory.read_json(PASSPORT)
    happened = _happened(events)
    shown, interruptions = panels(steps, config.model_dump(mode="json", include={"buffer", "mismatch"})), marks(events)
    return {
        "name": directory.name,
        "place": directory.path(),
        "state": state_of(events, owner=owner),
        "written_at": time.time(),
        "config": config,
        "in_words": list(in_words(config)),
        "run_yaml": dumped(hidden(directory.settings())),
        "summary": summary_of(directory, steps),
        "evaluations": [step for step in steps if step.get("eval/reward") is not None],
        "drawings": [drawing(panel, interruptions, steps_of(shown)) for panel in shown],
        "frame": {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
        "num_interruptions": sum(
            event["kind"] in ("failure", "resumed") and not fleet.is_drain(event) for event in events
        ),
        "samples": samples(directory),
        "num_completions": NUM_COMPLETIONS,
        "happened": happened[-_MOST_EVENTS:],
        "num_left_out": max(len(happened) - _MOST_EVENTS, 0),
        "failed_rewards": failed_rewards(events),
        "left_parts": left_parts(events),
        "costs": costs(steps, events),
        "passport_digest": digest_of(passport),
        "versions": passport.get("versions", {}),
        "passport": json.dumps(passport, indent=1),
        "checkpoints": list(directory.checkpoints().values()),
        "commands": _commands(directory, config),
    }


def state_of(events: Sequence[Mapping[str, Any]], *, owner: str | None) -> str:
    """`finished`, `stopped`, `failed`, `running`, `killed` or `starting`. `owner` is the driver that lived before the events were read."""
    last = fleet.last_told(events)
    if last is None:
        return "starting"
    return last["kind"] if last["kind"] != "launched" else "running" if owner else "killed"


def _happened(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Failures, recoveries and stops, in words. Workers that join while a driver starts are left out."""
    has_started = False
    kept: list[dict[str, Any]] = []
    for event in events:
        has_started = event["kind"] == "started" or (has_started and event["kind"] != "launched")
        is_news = event["kind"] != "worker_joined" or has_started
        kept += [
            mark
            for mark in fleet.marks([event])
            if is_news and (mark["tone"] != "plain" or mark["kind"] in _ALSO_SHOWN) and mark["kind"] != "finished"
        ]
    return kept


def _commands(directory: RunDirectory, config: RunConfig) -> list[tuple[str, str]]:
    run = shlex.quote(directory.url)
    begin = f"learn {shlex.quote(config.recorded)}" if config.recorded is not None else "train"
    # A run file is read from a disk only. In a copied run directory it still names the original run_dir.
    file = None if "://" in directory.url else shlex.quote(f"{directory.url}/{RUN_YAML}")
    is_here = RunDirectory(config.run_dir).path() == directory.path()
    here = "" if is_here else f" {shlex.quote(f'run_dir={flow(directory.url)}')}"
    found = [
        ("show it in a browser, down to the token", f"treadwheel view {run}"),
        ("check ledger, digests, staleness and checkpoints", f"treadwheel verify {run}"),
        ("learn the record again and compare the weights", f"treadwheel replay {run}"),
        ("resume it from the last checkpoint", file and f"treadwheel {begin} {file}{here}"),
        ("evaluate the last checkpoint", f"treadwheel eval {run}"),
        ("compare its mathematics with another run's", f"treadwheel passport diff {run} OTHER"),
    ]
    return [(what, command) for what, command in found if command is not None]


@functools.cache
def _environment() -> Environment:
    made = templates(_HERE, trim_blocks=True, lstrip_blocks=True)
    made.filters["score"] = _score
    return made


def _score(value: float | None) -> str:
    """Three digits after the point, fewer for a large number; a dash for None."""
    return "–" if value is None else f"{value:.3f}" if abs(value) < 100 else number(value)
