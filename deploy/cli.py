"""`treadwheel`: one command a verb. Parses, calls, prints; what it calls raises our errors, which become one line and an exit code.

Exit codes: 0 done, 1 the run failed, 2 the configuration cannot work, 130 interrupted.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console

from cluster.contracts.errors import ConfigError, TreadwheelError

app = typer.Typer(
    help="Reinforcement-learning post-training of language models on Ray, from a laptop CPU to many GPUs.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
passport = typer.Typer(help="What a run computed, down to the last epsilon.", no_args_is_help=True)
app.add_typer(passport, name="passport")

RunFile = Annotated[str, typer.Argument(metavar="RUN.yaml", help="The run's configuration.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Settings in place of the file's.")]
RunDir = Annotated[str, typer.Argument(metavar="RUN_DIR", help="A run directory: local, s3:// or gs://.")]
Address = Annotated[
    str | None, typer.Option(help="Ray cluster to run on ('auto', or host:port); else RAY_ADDRESS, else a local one.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def main() -> None:
    # Your own rewards and prompt sources lie where you stand. Actors on this machine inherit the environment.
    sys.path.insert(0, os.getcwd())
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    app(prog_name="treadwheel")


@app.command()
def train(run: RunFile, overrides: Overrides = None, address: Address = None, debug: Debug = False) -> None:
    """Train, from wherever the run directory stands."""
    with _reporting(debug=debug, on_interrupt="stopped cleanly; the same command goes on from the last checkpoint"):
        from cluster.run_directory import RunDirectory
        from deploy import configuration, curves, preflight, run_info

        config = configuration.load(run, overrides or [])
        preflight.check(config, address=address)
        from deploy import launch

        summary = launch.train(config, address=address)
        directory = RunDirectory(config.run_dir)
        curves.draw(directory)
        run_info.print_summary(directory, summary)


@app.command()
def check(run: RunFile, overrides: Overrides = None, address: Address = None, debug: Debug = False) -> None:
    """Validate everything, show derived sizes, placement and memory; start nothing."""
    with _reporting(debug=debug):
        from deploy import configuration, preflight

        report = preflight.check(configuration.load(run, overrides or []), address=address)
        Console().print(report.table())


@app.command(name="eval")
def evaluate(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="RUN_OR_CHECKPOINT... [a.b=c]...", help="Run files, run directories or checkpoints."),
    ],
    address: Address = None,
    debug: Debug = False,
) -> None:
    """Held-out evaluation of run files (their starting model), run directories (their last checkpoint) or checkpoints."""
    with _reporting(debug=debug):
        from deploy import evaluation

        overrides = [target for target in targets if "=" in target]
        for target in targets:
            if target not in overrides:
                evaluation.print_scores(target, evaluation.evaluate(target, overrides, address=address))


@app.command()
def info(run_dir: RunDir, debug: Debug = False) -> None:
    """Where a run stands: progress, numbers, failures, checkpoints; live or done."""
    with _reporting(debug=debug):
        from cluster.run_directory import RunDirectory
        from deploy import run_info

        Console().print(run_info.table(RunDirectory(run_dir)))


@app.command()
def verify(run_dir: RunDir, debug: Debug = False) -> None:
    """Check ledger, digests, schema and staleness of what a run recorded; exit code 1 if anything is wrong."""
    with _reporting(debug=debug):
        from cluster.run_directory import RunDirectory
        from deploy import run_info
        from deploy import verify as verification

        directory = RunDirectory(run_dir)
        verdict = verification.verify(directory, run_info.config_of(directory))
        for problem in verdict.problems:
            typer.echo(problem)
        typer.echo(
            f"{verdict.num_steps} steps, {verdict.num_groups} groups, {verdict.num_trajectories} trajectories, "
            f"{verdict.num_tokens} tokens: {'clean' if not verdict.problems else f'{len(verdict.problems)} problems'}"
        )
        if verdict.problems:
            raise typer.Exit(1)


@passport.command(name="diff")
def passport_diff(
    left: Annotated[str, typer.Argument(metavar="A", help="Run directory, or passport.json.")],
    right: Annotated[str, typer.Argument(metavar="B", help="Run directory, or passport.json.")],
    debug: Debug = False,
) -> None:
    """What differs in mathematics between two runs; exit code 1 if anything does."""
    with _reporting(debug=debug):
        from deploy import run_info

        differences = run_info.passport_differences(left, right)
        for name, (theirs, ours) in differences.items():
            typer.echo(f"{name}: {theirs!r} | {ours!r}")
        typer.echo(f"{len(differences)} differences" if differences else "the same mathematics")
        if differences:
            raise typer.Exit(1)


@contextlib.contextmanager
def _reporting(*, debug: bool, on_interrupt: str = "interrupted") -> Iterator[None]:
    """Our own errors end the command with one line and a code; with --debug they show where they came from."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"treadwheel: {on_interrupt}", err=True)
        raise typer.Exit(130) from None
    except TreadwheelError as error:
        if debug:
            raise
        typer.echo(f"treadwheel: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None


if __name__ == "__main__":
    main()
