"""Describes errors of a user's function: class, message, and the line in the user's file."""

import os
import sysconfig
import traceback
from pathlib import Path

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
