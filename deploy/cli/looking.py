"""Verbs that read what a run recorded. They start nothing."""

import contextlib
import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from deploy.cli import completion
from deploy.cli.application import Debug, RunDir, app, reporting

_OF_PASSPORT = "Run directory, or passport.json."
passport = typer.Typer(help="Compare what runs computed, down to the last epsilon.", no_args_is_help=True)
app.add_typer(passport, name="passport", rich_help_panel="Look")


@app.command(rich_help_panel="Look")
def info(
    run_dir: RunDir,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show a live table until the run ends; Ctrl-C does not end the run.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Show a run's progress, numbers, failures and checkpoints, live or done."""
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
        typer.Argument(metavar="[FOLDER]...", help="Folders or prefixes of an object store to search. Default: runs/"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array, for programs.")] = False,
    debug: Debug = False,
) -> None:
    """List the runs below folders or prefixes of an object store, the latest first: state, step, last numbers."""
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
    """Check what a run recorded: ledger, digests, schema, staleness, checkpoints. Exit code 1 if anything is wrong."""
    with reporting(debug=debug):
        from cluster.record.run_directory import RunDirectory
        from cluster.sinks.console.words import for_terminal
        from deploy.reports import run_info
        from deploy.reports import verify as verification

        directory = RunDirectory(run_dir)
        verdict = verification.verify(directory, run_info.config_of(directory))
        for problem in verdict.problems:
            typer.echo(for_terminal(problem))
        typer.echo(str(verdict))
        if verdict.problems:
            raise typer.Exit(1)


@app.command(rich_help_panel="Look")
def trace(
    run_dir: RunDir,
    out: Annotated[str, typer.Option(metavar="FILE", help="File to write.")] = "trace.json",
    steps: Annotated[str | None, typer.Option(metavar="10-20", help="Only these steps.")] = None,
    debug: Debug = False,
) -> None:
    """Write a trace of which actor did what when, for ui.perfetto.dev or chrome://tracing. The run may be live or done."""
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
            metavar="FORMAT", help="parquet: all columns; sft: the best completions; dpo: best and worst of each group."
        ),
    ] = "parquet",
    steps: Annotated[str | None, typer.Option(metavar="10-20", help="Only these steps.")] = None,
    best: Annotated[int, typer.Option(min=1, help="For sft: number of completions from each group.")] = 1,
    min_reward: Annotated[
        float | None, typer.Option(help="For sft and dpo: the lowest reward that is exported.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Export recorded trajectories as Parquet, examples for supervised fine-tuning, or pairs for preference training."""
    with reporting(debug=debug):
        from cluster.contracts.errors import ConfigError
        from cluster.record.run_directory import RunDirectory
        from deploy import export as exporting

        if format not in exporting.FORMATS:
            raise ConfigError(f"--format={format!r} does not exist; choose {', '.join(exporting.FORMATS)}")
        if best != 1 and format != "sft":
            raise ConfigError(f"--best={best} has no effect with --format={format}; leave it out, or use --format=sft")
        if min_reward is not None and format == "parquet":
            raise ConfigError(
                f"--min-reward={min_reward:g} has no effect with --format=parquet, which has all; leave it out"
            )
        chosen = exporting.Chosen(steps=steps, best=best, min_reward=min_reward)
        number = exporting.export(RunDirectory(run_dir), out, format=format, chosen=chosen)
        typer.echo(f"{out}: {number:,} {'rows' if format == 'parquet' else 'lines'}")


@app.command(rich_help_panel="Look")
def report(
    run_dir: RunDir,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="File to write. Default: report.html in the run directory."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write one HTML file about a run, live or done: settings, curves, samples, failures, passport. It opens offline."""
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
    """Show how two runs differ: first in mathematics, then in the rest. Exit code 1 if the mathematics differ."""
    with reporting(debug=debug):
        from deploy.reports import run_info
        from deploy.reports.passport import is_mathematical

        differences = run_info.passport_differences(left, right)
        mathematical = {name: pair for name, pair in differences.items() if is_mathematical(name)}
        typer.echo("mathematics:" if mathematical else "mathematics: the same")
        for name, (one, other) in mathematical.items():
            typer.echo(f"  {name}: {one!r} | {other!r}")
        if len(mathematical) < len(differences):
            typer.echo("other differences:")
        for name in sorted(differences.keys() - mathematical.keys()):
            typer.echo(f"  {name}: {differences[name][0]!r} | {differences[name][1]!r}")
        if mathematical:
            raise typer.Exit(1)
