"""The verb that shows runs in a browser."""

from typing import Annotated

import typer

from deploy.cli.application import Debug, app, reporting


@app.command(rich_help_panel="Look")
def view(
    run_dirs: Annotated[
        list[str],
        typer.Argument(metavar="RUN_DIR...", help="Run directories, or folders that hold some; local or in a store."),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    host: Annotated[
        str, typer.Option(help="Address to listen on; one beyond this machine gets a token.")
    ] = "127.0.0.1",
    trusted_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name by which browsers reach it, behind a proxy for example."),
    ] = None,
    token_env: Annotated[
        str | None,
        typer.Option(metavar="VARIABLE", help="Environment variable of a token that every reader must bring."),
    ] = None,
    root_path: Annotated[
        str,
        typer.Option(
            metavar="/PREFIX", help="Prefix that a proxy serves it under, if the proxy does not say so itself."
        ),
    ] = "",
    debug: Debug = False,
) -> None:
    """Show runs in a browser, live or done, down to the token."""
    with reporting(debug=debug):
        from deploy.viewer import app as viewer

        viewer.serve(
            run_dirs,
            host=host,
            port=port,
            trusted_hosts=trusted_host or [],
            token=viewer.token_of(token_env),
            root_path=root_path,
            says=typer.echo,
        )
