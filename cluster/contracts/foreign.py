"""A user's own code: its source, and what is told of its errors: class, message, and the line in the user's file."""

import inspect
import linecache
import os
import sysconfig
import traceback
from pathlib import Path
from typing import Any, cast

_FOREIGN = tuple(
    os.path.join(folder, "")
    for folder in (
        *(str(Path(__file__).parents[2] / own) for own in ("actors", "cluster", "deploy", "learner", "treadwheel")),
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    )
)
"""Folders of code that is not the user's: this project, Python, installed packages."""


def described(error: BaseException) -> str:
    """The error's class name, and its message if it has one."""
    try:
        message = str(error)
    except BaseException:  # noqa: BLE001 - foreign code: a __str__ of the user's
        message = "its message cannot be read"
    return f"{type(error).__name__}: {message}".removesuffix(": ")


def line_of(error: BaseException) -> str:
    """The last line of the user's own code in the traceback, as ` (my_rewards.py, line 12)`; empty if there is none."""
    lines = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    own = [(file, number) for file, number in lines if os.path.isabs(file) and not file.startswith(_FOREIGN)]
    return f" ({os.path.basename(own[-1][0])}, line {own[-1][1]})" if own else ""


def source_bytes(of: Any) -> bytes:
    """The source file of a function or class, also from an archive. Empty if there is none."""
    inner = inspect.unwrap(getattr(of, "func", of))
    is_written = inspect.isroutine(inner) or inspect.isclass(inner)
    written = cast(Any, inner if is_written else type(inner))
    try:
        file = inspect.getsourcefile(written)
        return Path(file).read_bytes() if file else b""
    except TypeError:
        return b""
    except OSError:  # the file is in an archive, or does not exist
        return "".join(linecache.getlines(inspect.getfile(written), vars(inspect.getmodule(written)))).encode()
