"""The verb that shows runs in a browser."""

from typing import Annotated

import typer

from cluster.contracts.errors import ConfigError
from deploy.cli import completion
from deploy.cli.application import Debug, app, reporting


@app.command(rich_help_panel="Look")
def view(
    run_dirs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_DIR...",
            help="Run directories, or folders that contain some, on a disk or in an object store.",
            autocompletion=completion.run_directories,
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    host: Annotated[
        str, typer.Option(help="Address to listen on. One that other machines reach gets a token.")
    ] = "127.0.0.1",
    trusted_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Host name by which browsers reach the viewer, for example behind a proxy."),
    ] = None,
    token_env: Annotated[
        str | None,
        typer.Option(metavar="VARIABLE", help="Environment variable with the token that every reader must send."),
    ] = None,
    root_path: Annotated[
        str,
        typer.Option(metavar="/PREFIX", help="URL prefix of the proxy in front, if it sends no X-Forwarded-Prefix."),
    ] = "",
    export: Annotated[
        str | None,
        typer.Option(metavar="FILE.html", help="Write one step into a file that opens offline, and start no server."),
    ] = None,
    step: Annotated[int | None, typer.Option(min=1, help="Step that --export writes. Default: the last one.")] = None,
    debug: Debug = False,
) -> None:
    """Show runs in a browser, live or done, down to the token."""
    with reporting(debug=debug):
        from deploy.viewer import app as viewer
        from deploy.viewer import export as exporting

        if export is not None:
            typer.echo(exporting.export(_only(run_dirs), step=step, file=export))
            return
        if step is not None:
            raise ConfigError("--step says which step --export writes; name a file with --export step.html")

        viewer.serve(
            run_dirs,
            host=host,
            port=port,
            trusted_hosts=trusted_host or [],
            token=viewer.token_of(token_env),
            root_path=root_path,
            says=typer.echo,
        )


def _only(run_dirs: list[str]) -> str:
    if len(run_dirs) != 1:
        raise ConfigError(f"--export writes a step of one run, and {len(run_dirs)} were named; name one run directory")
    return run_dirs[0]
