"""`treadwheel`: one command a verb. Parses, calls, prints; what it calls raises our errors, which become one line and an exit code.

Exit codes: 0 done, 1 the run failed, 2 the configuration cannot work, 75 preempted (the same command goes on), 130 interrupted.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cluster.contracts.errors import ConfigError, PreemptedError, TreadwheelError

if TYPE_CHECKING:
    from deploy.reports.summary import Summary

app = typer.Typer(
    help="Reinforcement-learning post-training of language models on Ray, from a laptop CPU to many GPUs.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_EXIT_CODES: dict[type[TreadwheelError], int] = {ConfigError: 2, PreemptedError: 75}
passport = typer.Typer(help="What a run computed, down to the last epsilon.", no_args_is_help=True)
app.add_typer(passport, name="passport")

RunFile = Annotated[str, typer.Argument(metavar="RUN.yaml", help="The run's configuration.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Settings in place of the file's.")]
RunDir = Annotated[str, typer.Argument(metavar="RUN_DIR", help="A run directory.")]
Address = Annotated[
    str | None, typer.Option(help="Ray cluster to run on ('auto', or host:port); else RAY_ADDRESS, else a local one.")
]
WaitForClaim = Annotated[
    str,
    typer.Option(
        metavar="10m",
        help="How long to wait for a driver that has the run directory: for a retry that starts while the last one dies.",
    ),
]
WaitForNodes = Annotated[
    str | None, typer.Option(metavar="30m", help="How long to wait for the nodes that the run asks for.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def main() -> None:
    # Your own rewards and prompt sources lie where you stand. Last, so that a file named json.py is not taken for Python's.
    sys.path.append(os.getcwd())
    app(prog_name="treadwheel")


@app.command()
def train(
    run: RunFile,
    overrides: Overrides = None,
    address: Address = None,
    wait_for_claim: WaitForClaim = "0s",
    wait_for_nodes: WaitForNodes = None,
    debug: Debug = False,
) -> None:
    """Train, from wherever the run directory stands."""
    with _reporting(debug=debug) as ctrl_c:
        from deploy import preflight
        from deploy.claims import once_free
        from deploy.config import loading as configuration
        from deploy.durations import seconds

        def checked_and_trained() -> "Summary":
            preflight.check(config, address=address)
            from deploy import launch

            ctrl_c.raise_if_pressed()
            return launch.train(config, address=address)

        wait_s = seconds(wait_for_claim, option="--wait-for-claim")
        waits: list[str] = []
        if wait_for_nodes is not None:
            waits = [f"elastic.wait_for_nodes_s={seconds(wait_for_nodes, option='--wait-for-nodes')}"]
        config = configuration.load(run, [*(overrides or []), *waits])
        _show(config.run_dir, once_free(config.run_dir, checked_and_trained, wait_s=wait_s))


@app.command()
def learn(
    recorded: Annotated[
        str, typer.Argument(metavar="RUN_OR_ARROW", help="Run directory, .arrow file, or a folder of them.")
    ],
    run: RunFile,
    overrides: Overrides = None,
    address: Address = None,
    wait_for_claim: WaitForClaim = "0s",
    debug: Debug = False,
) -> None:
    """Learn from recorded trajectories, without sampling; from wherever the run directory stands."""
    with _reporting(debug=debug) as ctrl_c:
        from deploy import preflight
        from deploy.claims import once_free
        from deploy.config import loading as configuration
        from deploy.durations import seconds

        def checked_and_learned() -> "Summary":
            preflight.check_learning(config, address=address)
            from deploy import learning

            ctrl_c.raise_if_pressed()
            return learning.learn(config, address=address)

        wait_s = seconds(wait_for_claim, option="--wait-for-claim")
        config = configuration.load(run, [*(overrides or []), f"recorded={recorded}"])
        _show(config.run_dir, once_free(config.run_dir, checked_and_learned, wait_s=wait_s))


@app.command(name="import")
def import_rows(
    rows: Annotated[
        str, typer.Argument(metavar="ROWS", help="A prompt file with columns completion, reward and maybe group.")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT.arrow", help="Where the trajectories go.")],
    run: RunFile,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Make trajectories for `learn` of prompts with completions and rewards, by the tokenizer and template of the run's model."""
    with _reporting(debug=debug):
        from deploy import recorded
        from deploy.config import loading as configuration

        config = configuration.load(run, overrides or [])
        num_groups, num_rows = recorded.import_rows(rows, out, model=config.model, prompts=config.prompts)
        typer.echo(f"{num_rows} trajectories in {num_groups} groups: {out}")


@app.command()
def check(
    run: RunFile,
    overrides: Overrides = None,
    address: Address = None,
    resolve: Annotated[
        bool, typer.Option("--resolve", help="Print the run file with all that it leaves out written out, and stop.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Validate everything, show derived sizes, placement and memory; start nothing."""
    with _reporting(debug=debug):
        from deploy import preflight
        from deploy.config import loading as configuration

        config = configuration.load(run, overrides or [])
        if resolve:
            typer.echo(configuration.full_yaml(config), nl=False)
            return
        report = preflight.check(config, address=address)
        Console().print(report.table())


@app.command()
def kubernetes(
    run: RunFile,
    overrides: Overrides = None,
    site: Annotated[
        str | None, typer.Option(metavar="SITE.yaml", help="The cluster's image, volume, secrets and kinds of nodes.")
    ] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="A RayCluster that lasts, for `ray job submit`, in place of a RayJob.")
    ] = False,
    serve: Annotated[
        int | None,
        typer.Option(metavar="STEP", help="A RayService that serves the checkpoint of STEP, in place of a RayJob."),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Print nothing; check that FILE, edited by hand, can run RUN.yaml."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Print what `kubectl apply -f -` makes a job of: pods sized for the run, on a cluster with KubeRay."""
    with _reporting(debug=debug):
        from deploy.manifests import ray_job, ray_service, seating, text
        from deploy.manifests import site as sites

        read = ray_job.read(run, overrides or [])
        if check is not None:
            typer.echo(f"{check}: {seating.check(check, read)}")
            return
        if cluster and serve is not None:
            raise ConfigError("--cluster and --serve make two resources; run the command once for each")
        place, comment = sites.load(site), ""
        if serve is not None:
            made = ray_service.service(read, place, step=serve)
        elif cluster:
            made, comment = ray_job.cluster(read, place), ray_job.label_in_words(read, place)
        else:
            made = ray_job.job(read, place)
        typer.echo(text.dump(made, comment=comment), nl=False)


@app.command(name="list")
def list_variants(
    kind: Annotated[
        str | None, typer.Argument(metavar="[KIND]", help="rewards, prompts, losses, advantages, ...")
    ] = None,
    debug: Debug = False,
) -> None:
    """Variants that a run file may name: all kinds with their names, or one kind with parameters, defaults and meaning."""
    with _reporting(debug=debug):
        from deploy import listing

        for line in listing.overview() if kind is None else listing.listing(kind):
            typer.echo(line)


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

        overrides = [each for each in targets if _is_override(each)]
        named = [each for each in targets if not _is_override(each)]
        if not named:
            raise ConfigError(
                f"nothing to evaluate in {' '.join(targets)!r}; name a run file, a run directory or a checkpoint"
            )
        for target in named:
            evaluation.print_scores(target, evaluation.evaluate(target, overrides, address=address))


@app.command()
def info(run_dir: RunDir, debug: Debug = False) -> None:
    """Where a run stands: progress, numbers, failures, checkpoints; live or done."""
    with _reporting(debug=debug):
        from cluster.record.run_directory import RunDirectory
        from deploy.reports import run_info

        Console(markup=False, emoji=False).print(run_info.table(RunDirectory(run_dir)))


@app.command()
def verify(run_dir: RunDir, debug: Debug = False) -> None:
    """Check ledger, digests, schema and staleness of what a run recorded, and its checkpoints; exit code 1 if anything is wrong."""
    with _reporting(debug=debug):
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


@app.command()
def replay(
    run_dir: RunDir,
    to_step: Annotated[int | None, typer.Option(help="Last step to learn again; all, unless given.")] = None,
    out: Annotated[str | None, typer.Option(help="Hugging Face folder for the weights that it arrives at.")] = None,
    address: Address = None,
    debug: Debug = False,
) -> None:
    """Learn again from the recorded trajectories, without sampling; exit code 1 if the weights are not those of the run."""
    with _reporting(debug=debug):
        from cluster.record.run_directory import RunDirectory
        from deploy import replay as replaying
        from deploy.reports import run_info

        directory = RunDirectory(run_dir)
        config = run_info.config_of(directory)
        done = replaying.replay(directory, config, to_step=to_step, out=out, address=address)
        typer.echo(f"{done.num_steps} steps replayed, weights {done.digest}: {done.verdict}")
        if done.differs:
            raise typer.Exit(1)


@app.command(name="serve-reward")
def serve_reward(
    judge: Annotated[str, typer.Argument(metavar="JUDGE", help="As in a run file: math_verify, or my_rewards:judge.")],
    params: Annotated[list[str] | None, typer.Argument(metavar="[a=b]...", help="The judge's parameters.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; one beyond this machine needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    key_env: Annotated[str | None, typer.Option(help="Environment variable of the bearer token to ask for.")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="As reward.timeout_s.")] = 30.0,
    max_concurrency: Annotated[int, typer.Option(min=1, help="As reward.max_concurrency.")] = 64,
    env: Annotated[list[str] | None, typer.Option(help="As reward.env: a variable that the judge sees.")] = None,
    debug: Debug = False,
) -> None:
    """Serve a judge to runs on other machines, as `judge: {name: remote, endpoint: http://host:port}`."""
    with _reporting(debug=debug):
        from cluster.contracts.config import RewardConfig
        from cluster.contracts.plugins import Plugin
        from deploy import serving
        from deploy.config import loading as configuration

        plugin = Plugin(name=judge, params=dict(map(configuration.parsed, params or [])))
        config = RewardConfig(judge=plugin, timeout_s=timeout_s, max_concurrency=max_concurrency, env=tuple(env or ()))
        serving.serve(config, host=host, port=port, key_env=key_env, says=typer.echo)


@app.command()
def scale(
    run_dir: RunDir,
    asked: Annotated[
        str, typer.Argument(metavar="ACTORS=N", help="How many to have: rollout_workers=4, or reward_services=4.")
    ],
    debug: Debug = False,
) -> None:
    """Change the number of rollout workers, or of reward services, of a live run."""
    with _reporting(debug=debug):
        from cluster.record.run_directory import RunDirectory
        from deploy.cluster_up import steering

        name, _, number = asked.partition("=")
        if name not in steering.SETTINGS or not number.isdecimal():
            raise ConfigError(f"{asked!r} is not of the form rollout_workers=4 or reward_services=4")
        steering.scale(RunDirectory(run_dir), actors=name, number=int(number))
        typer.echo(f"asked for {number} {name.replace('_', ' ')}; `treadwheel info {run_dir}` shows them come and go")


@passport.command(name="diff")
def passport_diff(
    left: Annotated[str, typer.Argument(metavar="A", help="Run directory, or passport.json.")],
    right: Annotated[str, typer.Argument(metavar="B", help="Run directory, or passport.json.")],
    debug: Debug = False,
) -> None:
    """What differs in mathematics between two runs, then what else does; exit code 1 if the mathematics differ."""
    with _reporting(debug=debug):
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


def _is_override(argument: str) -> bool:
    """`a.b=c`; a path may have a "=" too."""
    name, equals, _ = argument.partition("=")
    return bool(equals) and "/" not in name and not os.path.exists(argument)


def _show(run_dir: str, summary: "Summary") -> None:
    from cluster.record.run_directory import RunDirectory
    from deploy.reports import curves, run_info

    directory = RunDirectory(run_dir)
    curves.draw(directory)
    run_info.print_summary(directory, summary)


class _CtrlC:
    """Python's own handler, with a memory: a KeyboardInterrupt that falls on a destructor or an import's callback is lost."""

    def __init__(self) -> None:
        self._is_pressed = False

    def __call__(self, *_: object) -> None:
        self._is_pressed = True
        raise KeyboardInterrupt

    def raise_if_pressed(self) -> None:
        if self._is_pressed:
            raise KeyboardInterrupt


@contextlib.contextmanager
def _reporting(*, debug: bool) -> Iterator[_CtrlC]:
    """Our own errors end the command with one line and a code; with --debug they show where they came from."""
    ctrl_c = _CtrlC()
    before = signal.signal(signal.SIGINT, ctrl_c)
    try:
        yield ctrl_c
    except KeyboardInterrupt as interrupt:
        typer.echo(f"treadwheel: {str(interrupt) or 'interrupted'}", err=True)
        raise typer.Exit(130) from None
    except TreadwheelError as error:
        if debug:
            raise
        typer.echo(f"treadwheel: {error}", err=True)
        raise typer.Exit(next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), 1)) from None
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    main()
