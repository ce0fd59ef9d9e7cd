"""The command itself: arguments that its verbs share, and the message and exit code of each error.

Exit codes: 0 done, 1 the run failed, 2 the configuration cannot work, 75 preempted (the same command goes on), 130 interrupted.
"""

import contextlib
import signal
from collections.abc import Iterator
from typing import Annotated

import typer

from cluster.contracts.errors import ConfigError, PreemptedError, TreadwheelError
from deploy.cli import completion

app = typer.Typer(
    help="Reinforcement-learning post-training of language models on Ray, from a laptop CPU to many GPUs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_EXIT_CODES: dict[type[TreadwheelError], int] = {ConfigError: 2, PreemptedError: 75}

RunFile = Annotated[
    str, typer.Argument(metavar="RUN.yaml", help="The run's configuration.", autocompletion=completion.run_files)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[a.b=c]...", help="Settings that replace those of the file.", autocompletion=completion.settings
    ),
]
RunDir = Annotated[
    str, typer.Argument(metavar="RUN_DIR", help="A run directory.", autocompletion=completion.run_directories)
]
Address = Annotated[
    str | None, typer.Option(help="Ray cluster: 'auto' or host:port. Default: RAY_ADDRESS, else a local cluster.")
]
WaitForClaim = Annotated[
    str,
    typer.Option(
        metavar="10m",
        help="How long to wait for another driver to release the run directory: a retry may start before the last one has ended.",
    ),
]
WaitForNodes = Annotated[
    str | None, typer.Option(metavar="30m", help="How long to wait for the nodes that the run needs.")
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print only warnings, errors and the summary, whatever metrics.sinks says."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


class CtrlC:
    """Python's SIGINT handler, which also remembers the signal: Python drops a KeyboardInterrupt in a destructor or an import callback."""

    def __init__(self) -> None:
        self._is_pressed = False

    def __call__(self, *_: object) -> None:
        self._is_pressed = True
        raise KeyboardInterrupt

    def raise_if_pressed(self) -> None:
        if self._is_pressed:
            raise KeyboardInterrupt


@contextlib.contextmanager
def reporting(*, debug: bool) -> Iterator[CtrlC]:
    """Our own errors end the command with one line, without secrets, and an exit code. With --debug they show a traceback."""
    ctrl_c = CtrlC()
    before = signal.signal(signal.SIGINT, ctrl_c)
    try:
        yield ctrl_c
    except KeyboardInterrupt as interrupt:
        typer.echo(f"treadwheel: {str(interrupt) or 'interrupted'}", err=True)
        raise typer.Exit(130) from None
    except TreadwheelError as error:
        if debug:
            raise
        from cluster.contracts.hiding import hidden
        from cluster.sinks.console.words import for_terminal

        for line in (f"treadwheel: {error}", *getattr(error, "__notes__", ())):
            typer.echo(for_terminal(hidden(line)), err=True)
        raise typer.Exit(next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), 1)) from None
    finally:
        signal.signal(signal.SIGINT, before)
