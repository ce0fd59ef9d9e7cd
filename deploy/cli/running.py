"""Verbs that start a run, an evaluation or a replay, or change a live run."""

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import deploy
from cluster.contracts.errors import ConfigError, InUseError
from deploy.cli import completion
from deploy.cli.application import (
    Address,
    Debug,
    Overrides,
    Quiet,
    RunDir,
    RunFile,
    WaitForClaim,
    WaitForNodes,
    app,
    reporting,
)
from deploy.cluster_up.ahead import RayAhead

if TYPE_CHECKING:
    from cluster.contracts.config import RunConfig
    from deploy.reports.summary import Summary


@app.command(rich_help_panel="Run")
def train(
    run: RunFile,
    overrides: Overrides = None,
    address: Address = None,
    wait_for_claim: WaitForClaim = "0s",
    wait_for_nodes: WaitForNodes = None,
    quiet: Quiet = False,
    only_settings: Annotated[
        bool,
        typer.Option(
            "--only-settings", help="Check the settings, in a second or two, and stop: before a cluster starts."
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Train, or resume the run in the run directory. A terminal shows a live table; elsewhere each step is a line."""
    if not only_settings:
        return _train(run, overrides, address, wait_for_claim, wait_for_nodes, quiet, debug)
    with reporting(debug=debug), contextlib.suppress(InUseError):  # the run itself waits for its directory
        from deploy.preflight.at_once import check_settings

        check_settings(_asked(run, overrides, wait_for_claim, wait_for_nodes)[0], address=address)


@app.command(rich_help_panel="Run")
def quickstart(
    overrides: Overrides = None, address: Address = None, quiet: Quiet = False, debug: Debug = False
) -> None:
    """Train the small included model, in two to five minutes on two cores, into runs/quickstart below the current folder."""
    home = Path(deploy.__file__).parent
    from deploy.config.yaml_text import flow

    model = f"model.path={flow(str(home / 'quickstart/model'))}"
    _train(str(home / "runs/quickstart.yaml"), [model, *(overrides or [])], address, "0s", None, quiet, debug)


def _train(
    run: str,
    overrides: list[str] | None,
    address: str | None,
    wait_for_claim: str,
    wait_for_nodes: str | None,
    quiet: bool,
    debug: bool,
) -> None:
    with RayAhead(address) as ahead, reporting(debug=debug) as ctrl_c:
        from deploy.claims import once_free
        from deploy.config import loading as configuration

        def checked_and_trained() -> "Summary":
            from deploy import preflight
            from deploy.preflight.at_once import check_settings

            check_settings(config, address=address)
            ahead.import_for(config)
            with _checking(config):
                preflight.check(config, address=address, looks_good=ahead.start, ask=ahead.ask)
                from deploy import launch  # Ray, which not every refused run needs

            ctrl_c.raise_if_pressed()
            return launch.train(config, address=address, ahead=ahead)

        config, wait_s = _asked(run, overrides, wait_for_claim, wait_for_nodes)
        config = configuration.quiet(config) if quiet else config
        show(config.run_dir, once_free(config.run_dir, checked_and_trained, wait_s=wait_s))


def _asked(
    run: str, overrides: list[str] | None, wait_for_claim: str, wait_for_nodes: str | None
) -> "tuple[RunConfig, float]":
    """The run, and the seconds that it waits for its directory."""
    from deploy.config import loading as configuration
    from deploy.durations import seconds

    wait_s = seconds(wait_for_claim, option="--wait-for-claim")
    waits: list[str] = []
    if wait_for_nodes is not None:
        waits = [f"elastic.wait_for_nodes_s={seconds(wait_for_nodes, option='--wait-for-nodes')}"]
    return configuration.load(run, [*(overrides or []), *waits]), wait_s


@app.command(rich_help_panel="Run")
def learn(
    recorded: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_ARROW",
            help="Run directory, .arrow file, or folder of .arrow files.",
            autocompletion=completion.run_directories,
        ),
    ],
    run: RunFile,
    overrides: Overrides = None,
    address: Address = None,
    wait_for_claim: WaitForClaim = "0s",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Learn from recorded trajectories, without sampling, or resume such a run in the run directory."""
    with reporting(debug=debug) as ctrl_c:
        from deploy.claims import once_free
        from deploy.config import loading as configuration
        from deploy.durations import seconds

        def checked_and_learned() -> "Summary":
            from deploy import preflight
            from deploy.preflight.at_once import check_settings_of_learning

            check_settings_of_learning(config, address=address)
            with _checking(config):
                data = preflight.check_learning(config, address=address)
                from deploy import learning

            ctrl_c.raise_if_pressed()
            return learning.learn(config, data=data, address=address)

        wait_s = seconds(wait_for_claim, option="--wait-for-claim")
        from deploy.config.yaml_text import flow

        config = configuration.load(run, [*(overrides or []), f"recorded={flow(recorded)}"])
        config = configuration.quiet(config) if quiet else config
        show(config.run_dir, once_free(config.run_dir, checked_and_learned, wait_s=wait_s))


@app.command(name="eval", rich_help_panel="Run")
def evaluate(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT... [a.b=c]...",
            help="Run files, run directories or checkpoints.",
            autocompletion=completion.run_files_and_directories,
        ),
    ],
    address: Address = None,
    debug: Debug = False,
) -> None:
    """Evaluate on held-out prompts: the starting model of a run file, the last checkpoint of a run directory, or a checkpoint."""
    with reporting(debug=debug):
        from cluster.sinks.console.waiting import waiting
        from deploy import evaluation

        overrides = [each for each in targets if _is_override(each)]
        named = [each for each in targets if not _is_override(each)]
        if not named:
            raise ConfigError(
                f"nothing to evaluate in {' '.join(targets)!r}; name a run file, a run directory or a checkpoint"
            )
        with contextlib.ExitStack() as opened:
            configs: list[RunConfig] = []
            for target in named:
                with waiting(f"checks {target}"):
                    configs.append(opened.enter_context(evaluation.configured(target, overrides)))
                    evaluation.check(configs[-1], address=address)
            from deploy import launch

            for warning in evaluation.warnings(dict(zip(named, configs, strict=True))):
                typer.echo(warning, err=True)
            for target, config in zip(named, configs, strict=True):
                with waiting(f"evaluates {target}"):
                    scores = launch.evaluate(config, address=address)
                evaluation.print_scores(target, scores)


@app.command(rich_help_panel="Run")
def replay(
    run_dir: RunDir,
    to_step: Annotated[int | None, typer.Option(help="Last step to replay. Default: all recorded steps.")] = None,
    learned: Annotated[
        int | None, typer.Option(metavar="STEP", help="Write the record of learning of this step, for all its groups.")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Folder for the weights, in Hugging Face format. With --learned: file for the record (default: the run directory)."
        ),
    ] = None,
    address: Address = None,
    debug: Debug = False,
) -> None:
    """Learn the recorded trajectories again, without sampling, and compare the weights. Exit code 1 if they differ from the run's."""
    with reporting(debug=debug):
        from cluster.record.run_directory import RunDirectory
        from deploy import replay as replaying
        from deploy.reports import run_info

        if learned is not None and to_step is not None:
            raise ConfigError(f"--learned={learned} learns up to that step; leave --to-step out")
        directory = RunDirectory(run_dir)
        config = run_info.config_of(directory)
        if learned is None:
            done = replaying.replay(directory, config, to_step=to_step, out=out, address=address)
            typer.echo(f"{done.num_steps} steps replayed, weights {done.digest}: {done.verdict}")
        else:
            done, place = replaying.replay_learned(directory, config, step=learned, out=out, address=address)
            written = "nothing is written; --out names a file for it" if place is None else f"its record is {place}"
            typer.echo(f"step {learned} learned again, weights {done.digest}: {done.verdict}; {written}")
        if done.differs:
            raise typer.Exit(1)


@app.command(rich_help_panel="Run")
def scale(
    run_dir: RunDir,
    asked: Annotated[
        str, typer.Argument(metavar="ACTORS=N", help="Wanted number: rollout_workers=4 or reward_services=4.")
    ],
    debug: Debug = False,
) -> None:
    """Change the number of rollout workers or reward services of a live run."""
    with reporting(debug=debug):
        from cluster.record.run_directory import RunDirectory
        from deploy.cluster_up import orders

        name, _, number = asked.partition("=")
        if name not in orders.SETTINGS or not number.isdecimal():
            raise ConfigError(f"{asked!r} is not of the form rollout_workers=4 or reward_services=4")
        orders.scale(RunDirectory(run_dir), actors=name, number=int(number))
        typer.echo(f"asked for {number} {name.replace('_', ' ')}; `treadwheel info {run_dir}` shows them come and go")


def _checking(config: "RunConfig") -> contextlib.AbstractContextManager[None]:
    """A progress line, if the run itself prints to the console."""
    from cluster.sinks.console.waiting import waiting

    is_seen = any(sink.name == "console" and not sink.params.get("quiet") for sink in config.metrics.sinks)
    return waiting("checks settings, model, prompts, judge and machine") if is_seen else contextlib.nullcontext()


def _is_override(argument: str) -> bool:
    """`a.b=c`. A path may contain "=" too."""
    name, equals, _ = argument.partition("=")
    return bool(equals) and "/" not in name and not os.path.exists(argument)


def show(run_dir: str, summary: "Summary") -> None:
    from cluster.record.run_directory import RunDirectory
    from deploy.reports import run_info

    run_info.print_summary(RunDirectory(run_dir), summary)
