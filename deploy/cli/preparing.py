"""Verbs that prepare a run: they list variants, check settings and machine, convert files, and play environments."""

import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.contracts.errors import ConfigError
from deploy.cli import completion
from deploy.cli.application import Address, Debug, Overrides, RunFile, app, reporting


@app.command(rich_help_panel="Prepare")
def check(
    run: RunFile,
    overrides: Overrides = None,
    address: Address = None,
    resolve: Annotated[
        bool, typer.Option("--resolve", help="Print the run file with all defaults written out, and stop.")
    ] = False,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            metavar="gpus=8x80GB,nodes=2",
            help="Check only placement and memory, for hardware that is not here. Also cpus=96 and memory=1TB, for each node.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Check a run file and show its sizes, placement and memory. Environments are played twice; no run starts."""
    with reporting(debug=debug):
        from deploy import preflight
        from deploy.config import loading as configuration
        from deploy.preflight import hardware

        config = configuration.load(run, overrides or [])
        if resolve:
            if assume is not None or address is not None:
                raise ConfigError("--resolve uses no cluster; leave --assume and --address out")
            typer.echo(configuration.full_yaml(config), nl=False)
            return
        if assume is not None:
            if address is not None:
                raise ConfigError("--assume and --address name two clusters; leave one out")
            report = preflight.check_assumed(config, hardware.parse(assume))
        else:
            report = preflight.check(config, address=address, plays=True)
        Console().print(report.table())


@app.command(rich_help_panel="Prepare")
def init(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A new or empty folder.")],
    kind: Annotated[
        str, typer.Option(help="math, code, judge (your own reward), agent (an environment) or tools.")
    ] = "judge",
    debug: Debug = False,
) -> None:
    """Write a folder to start from: run file, prompts, reward or environment, and a test. It trains at once, on a small included model."""
    with reporting(debug=debug):
        from deploy import starting

        names = starting.start(folder, kind=kind)
        typer.echo(f"{folder}: {', '.join(names)}")
        # Without an activated environment its folder is not on the path.
        program = "treadwheel" if shutil.which("treadwheel") else str(Path(sys.executable).with_name("treadwheel"))
        typer.echo(f"next: cd {shlex.quote(folder)} && {shlex.quote(program)} train run.yaml")


@app.command(rich_help_panel="Prepare")
def doctor(debug: Debug = False) -> None:
    """Show what is installed and what this machine can do, with advice for each fault. Exit code 1 if there is a fault."""
    with reporting(debug=debug):
        from deploy import doctor as examination

        findings = examination.examined()
        Console(highlight=False).print(examination.table(findings))
        if any(each.advice for each in findings):
            raise typer.Exit(1)


@app.command(name="list", rich_help_panel="Prepare")
def list_variants(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="[KIND]", help="rewards, prompts, losses, advantages, ...", autocompletion=completion.variant_kinds
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """List the variants that a run file may name: all kinds with their names, or one kind with meaning, parameters and defaults."""
    with reporting(debug=debug):
        from deploy import listing

        for line in listing.overview() if kind is None else listing.listing(kind):
            typer.echo(line)


@app.command(name="import", rich_help_panel="Prepare")
def import_rows(
    rows: Annotated[
        str, typer.Argument(metavar="ROWS", help="Prompt file with the columns completion, reward, optionally group.")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT.arrow", help="File to write.")],
    run: RunFile,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Convert prompts with completions and rewards to trajectories for `learn`, by the tokenizer and template of the run's model."""
    with reporting(debug=debug):
        from deploy import recorded
        from deploy.config import loading as configuration

        config = configuration.load(run, overrides or [])
        num_groups, num_rows = recorded.import_rows(rows, out, model=config.model, prompts=config.prompts)
        typer.echo(f"{num_rows} trajectories in {num_groups} groups: {out}")


@app.command(rich_help_panel="Prepare")
def import_config(
    system: Annotated[str, typer.Argument(metavar="SYSTEM", help="trl or verl.")],
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="YAML, JSON, or a shell script with settings as key=value.")
    ],
    out: Annotated[
        str | None, typer.Argument(metavar="[OUT.yaml]", help="A new file. Without it the run file is printed.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of SYSTEM that replaces the file's."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Convert another system's configuration to a run file that names each setting's origin, or list the settings without an equivalent."""
    with reporting(debug=debug):
        from deploy import importing

        text = importing.run_file(system, file, settings or [])
        if out is None:
            typer.echo(text, nl=False)
            return
        importing.write(out, text)
        typer.echo(f"{out}: next: treadwheel check {shlex.quote(out)}")


@app.command(rich_help_panel="Prepare")
def kubernetes(
    run: RunFile,
    overrides: Overrides = None,
    site: Annotated[
        str | None, typer.Option(metavar="SITE.yaml", help="The cluster's image, volume, secrets and node types.")
    ] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Print a lasting RayCluster, for `ray job submit`, instead of a RayJob.")
    ] = False,
    serve: Annotated[
        int | None,
        typer.Option(
            metavar="STEP", min=1, help="Print a RayService that serves the checkpoint of STEP, instead of a RayJob."
        ),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Print no manifest; check that FILE, edited by hand, can run RUN.yaml."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Print the manifest of a job for `kubectl apply -f -`: pods sized for the run, on a cluster with KubeRay."""
    with reporting(debug=debug):
        from deploy.manifests import ray_cluster, ray_job, ray_service, seating, text
        from deploy.manifests import site as sites

        read = ray_job.read(run, overrides or [])
        if check is not None:
            if site is not None or cluster or serve is not None:
                raise ConfigError(f"--check={check!r} reads only that file; leave --site, --cluster and --serve out")
            typer.echo(f"{check}: {seating.check(check, read)}")
            return
        if cluster and serve is not None:
            raise ConfigError("--cluster and --serve make two resources; run the command once for each")
        place, comment = sites.load(site), ""
        if serve is not None:
            made = ray_service.service(read, place, step=serve)
        elif cluster:
            made, comment = ray_job.cluster(read, place), ray_cluster.LABEL_IN_WORDS
        else:
            made = ray_job.job(read, place)
        typer.echo(text.dump(made, comment=comment), nl=False)


@app.command(rich_help_panel="Prepare")
def play(
    environment: Annotated[
        str,
        typer.Argument(
            metavar="ENVIRONMENT",
            help="As in a run file: gym, or my_environments:guess. Or a RUN.yaml or run directory, for its environment and first prompt.",
            autocompletion=completion.run_files,
        ),
    ],
    params: Annotated[
        list[str] | None,
        typer.Argument(metavar="[a=b]...", help="The environment's parameters, or settings of RUN.yaml."),
    ] = None,
    say: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="The model's turns, in order, instead of stdin.")
    ] = None,
    episode: Annotated[
        str | None,
        typer.Option(metavar="GROUP/SAMPLE", help="Play the model's recorded turns of this episode of a run: 34/2."),
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="The task, as the user's first message.")] = None,
    columns: Annotated[str, typer.Option(metavar="YAML", help="The prompt's columns: '{answer: 42}'.")] = "{}",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the task. All episodes of a group have the same.")] = 0,
    env: Annotated[
        list[str] | None, typer.Option(help="As episodes.env: a variable that the environment may read.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="PATH", help="A model, for its tokenizer: show which tokens would be trained.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Play an environment: you type the model's turns, and no engine starts. Exit code 1 if it fails, or with --episode if it differs."""
    with reporting(debug=debug):
        from deploy import playing

        if episode is not None:
            asked = params or say or prompt or env or model or seed or columns != "{}"
            _play_again(environment, episode, alone=not asked)
            return
        game = playing.game(environment, params or [], prompt, columns, env or [], seed=seed)
        screen = Console(markup=False, emoji=False, highlight=False)
        says = playing.typed(screen) if say is None else playing.scripted(say, screen)
        if model is None:
            is_well = playing.play(game, says, screen)
        else:
            from deploy import playing_tokens

            tokens = playing_tokens.of_model(model, game)
            is_well = playing.play(game, says, screen, mouth=tokens)
            screen.print(tokens.shown(), soft_wrap=True)
        if not is_well:
            raise typer.Exit(1)


def _play_again(run_dir: str, episode: str, *, alone: bool) -> None:
    from deploy import playing, playing_again

    if not alone:
        raise ConfigError(f"--episode={episode!r} is played as recorded; leave everything but the run directory out")
    game, turns, was_ended = playing_again.of_record(run_dir, episode)
    screen = Console(markup=False, emoji=False, highlight=False)
    again = playing_again.Again(turns, screen)
    is_well = playing.play(game, playing.scripted(again.lines(), screen), screen, mouth=again)
    if again.num_differences:
        screen.print(f"  answers that differ from the run's: {again.num_differences}")
    if again.num_unasked:
        screen.print(f"  turns of the run that it does not ask for any more: {again.num_unasked}")
    is_longer = was_ended and again.asks_for_more
    if is_longer:
        screen.print("  in the run the environment ended the episode here")
    if not is_well or again.num_differences or again.num_unasked or is_longer:
        raise typer.Exit(1)


@app.command(name="serve-reward", rich_help_panel="Prepare")
def serve_reward(
    judge: Annotated[str, typer.Argument(metavar="JUDGE", help="As in a run file: math_verify, or my_rewards:judge.")],
    params: Annotated[list[str] | None, typer.Argument(metavar="[a=b]...", help="The judge's parameters.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. Any but loopback needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the bearer token that clients must send.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="As reward.timeout_s.")] = 30.0,
    max_concurrency: Annotated[int, typer.Option(min=1, help="As reward.max_concurrency.")] = 64,
    env: Annotated[list[str] | None, typer.Option(help="As reward.env: a variable that the judge may read.")] = None,
    debug: Debug = False,
) -> None:
    """Serve a judge to runs on other machines, as `judge: {name: remote, endpoint: http://host:port}`."""
    with reporting(debug=debug):
        from pydantic import ValidationError

        from cluster.contracts.config import RewardConfig
        from cluster.contracts.plugins import Plugin
        from cluster.contracts.reward_config import model_of, server_of
        from deploy import serving
        from deploy.config import loading as configuration
        from deploy.preflight.sandbox import check_sandboxes

        plugin = Plugin(name=judge, params=dict(map(configuration.parsed, params or [])))
        if model_of(plugin) or server_of(plugin):
            raise ConfigError(f"the judge {judge!r} asks a model that only a run has; name the judge in the run file")
        limits = {"timeout_s": timeout_s, "max_concurrency": max_concurrency}
        try:
            config = RewardConfig(judge=plugin, env=tuple(env or ()), **limits)
        except ValidationError as error:
            raise ConfigError("; ".join(configuration.explained(error, within="reward"))) from error
        check_sandboxes(config)
        serving.serve(config, host=host, port=port, key_env=key_env, says=typer.echo)
