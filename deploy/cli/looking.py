"""Verbs that look at what a run recorded, and start nothing."""

import contextlib
import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from deploy.cli import completion
from deploy.cli.application import Debug, RunDir, app, reporting

_OF_PASSPORT = "Run directory, or passport.json."
passport = typer.Typer(help="What a run computed, down to the last epsilon.", no_args_is_help=True)
app.add_typer(passport, name="passport", rich_help_panel="Look")


@app.command(rich_help_panel="Look")
def info(
    run_dir: RunDir,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="As a live table, until the run ends; Ctrl-C leaves the run alone.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Where a run stands: progress, numbers, failures, checkpoints; live or done."""
    with reporting(debug=debug):
        from cluster.record.run_directory import RunDirectory

        if watch:
            from deploy.reports import watching

            with contextlib.suppress(KeyboardInterrupt):
                watching.watch(RunDirectory(run_dir))
            return
        from deploy.reports import run_info

        Console(markup=False, emoji=False).print(run_info.table(RunDirectory(run_dir)))


@app.command(rich_help_panel="Look")
def runs(
    folders: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FOLDER]...", help="Where to look; runs/ unless given. A store's prefix too."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array, for programs.")] = False,
    debug: Debug = False,
) -> None:
    """Runs below folders or a store's prefix, the latest first: state, step, last numbers."""
    with reporting(debug=debug):
        from deploy.reports import run_list

        places = folders or ["runs"]
        found = run_list.listed([run for place in places for run in run_list.run_directories(place)])
        if as_json:
            typer.echo(json.dumps([asdict(run) for run in found], indent=1))
        elif found:
            Console(markup=False, emoji=False, highlight=False).print(run_list.table(found))
        else:
            typer.echo(f"no runs below {', '.join(places)}")


@app.command(rich_help_panel="Look")
def verify(run_dir: RunDir, debug: Debug = False) -> None:
    """Check ledger, digests, schema and staleness of what a run recorded, and its checkpoints; exit code 1 if anything is wrong."""
    with reporting(debug=debug):
        from cluster.record.run_directory import RunDirectory
        from deploy.reports import run_info
        from deploy.reports import verify as verification

        directory = RunDirectory(run_dir)
        verdict = verification.verify(directory, run_info.config_of(directory))
        for problem in verdict.problems:
            typer.echo(problem)
        typer.echo(str(verdict))
        if verdict.problems:
            raise typer.Exit(1)


@app.command(rich_help_panel="Look")
def trace(
    run_dir: RunDir,
    out: Annotated[str, typer.Option(metavar="FILE", help="Where to write it.")] = "trace.json",
    steps: Annotated[str | None, typer.Option(metavar="10-20", help="Of these steps alone.")] = None,
    debug: Debug = False,
) -> None:
    """Who did what when, live or done, as a trace for ui.perfetto.dev or chrome://tracing."""
    with reporting(debug=debug):
        from cluster.record.run_directory import RunDirectory
        from deploy.viewer import trace as tracing
        from deploy.whole_files import write_whole

        write_whole(out, json.dumps(tracing.trace(RunDirectory(run_dir), steps=steps)), option="--out")
        typer.echo(f"{out}: open it in ui.perfetto.dev or chrome://tracing")


@app.command(rich_help_panel="Look")
def export(
    run_dir: RunDir,
    out: Annotated[str, typer.Argument(metavar="OUT", help="A new folder for parquet, else a new file.")],
    format: Annotated[
        str,
        typer.Option(
            metavar="FORMAT", help="parquet: all columns; sft: the best completions; dpo: best and worst of groups."
        ),
    ] = "parquet",
    steps: Annotated[str | None, typer.Option(metavar="10-20", help="Of these steps alone.")] = None,
    best: Annotated[int, typer.Option(min=1, help="For sft: so many completions of each group.")] = 1,
    min_reward: Annotated[float | None, typer.Option(help="For sft and dpo: leave out completions below it.")] = None,
    debug: Debug = False,
) -> None:
    """Recorded trajectories as data: Parquet, examples for supervised fine-tuning, pairs for preference training."""
    with reporting(debug=debug):
        from cluster.contracts.errors import ConfigError
        from cluster.record.run_directory import RunDirectory
        from deploy import export as exporting

        if format not in exporting.FORMATS:
            raise ConfigError(f"--format={format!r} is not there; choose {', '.join(exporting.FORMATS)}")
        if best != 1 and format != "sft":
            raise ConfigError(f"--best={best} says nothing with --format={format}; leave it out, or use --format=sft")
        if min_reward is not None and format == "parquet":
            raise ConfigError(
                f"--min-reward={min_reward:g} says nothing with --format=parquet, which has all; leave it out"
            )
        chosen = exporting.Chosen(steps=steps, best=best, min_reward=min_reward)
        number = exporting.export(RunDirectory(run_dir), out, format=format, chosen=chosen)
        typer.echo(f"{out}: {number:,} {'rows' if format == 'parquet' else 'lines'}")


@app.command(rich_help_panel="Look")
def report(
    run_dir: RunDir,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Where to write it; report.html in the run directory, unless given."),
    ] = None,
    debug: Debug = False,
) -> None:
    """One HTML file about a run, live or done, to keep and to send: what ran, curves, samples, failures, passport. Works offline."""
    with reporting(debug=debug):
        from cluster.record.run_directory import RunDirectory
        from deploy.reports import report as page

        typer.echo(page.write(RunDirectory(run_dir), out))


@passport.command(name="diff")
def passport_diff(
    left: Annotated[str, typer.Argument(metavar="A", help=_OF_PASSPORT, autocompletion=completion.run_directories)],
    right: Annotated[str, typer.Argument(metavar="B", help=_OF_PASSPORT, autocompletion=completion.run_directories)],
    debug: Debug = False,
) -> None:
    """What differs in mathematics between two runs, then what else does; exit code 1 if the mathematics differ."""
    with reporting(debug=debug):
        from deploy.reports import run_info
        from deploy.reports.passport import is_mathematical

        differences = run_info.passport_differences(left, right)
        mathematical = {name: pair for name, pair in differences.items() if is_mathematical(name)}
        typer.echo("mathematics:" if mathematical else "mathematics: the same")
        for name, (one, other) in mathematical.items():
            typer.echo(f"  {name}: {one!r} | {other!r}")
        if len(mathematical) < len(differences):
            typer.echo("besides:")
        for name in sorted(differences.keys() - mathematical.keys()):
            typer.echo(f"  {name}: {differences[name][0]!r} | {differences[name][1]!r}")
        if mathematical:
            raise typer.Exit(1)
