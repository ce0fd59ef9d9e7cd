"""Explains why a user's function does not import by its path, `my_package.module:name`, and what to do."""

import difflib
import sys
from pathlib import PurePath
from types import ModuleType


def why_not(path: str, error: BaseException) -> str:
    """The explanation of `error`, which the import raised."""
    module, _, attribute = path.partition(":")
    if "/" in module or module.endswith(".py"):
        return f"write the module without folder and .py: {PurePath(module).stem}:{attribute}"
    found = sys.modules.get(module)
    if isinstance(error, AttributeError) and found is not None and error.obj is found and error.name == attribute:
        return _absent(found, attribute)
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return (
            f"there is no module {error.name!r}; start the command in the folder of {error.name.split('.')[0]}.py, or name that folder in "
            "PYTHONPATH"
        )
    return f"{type(error).__name__}: {error}; mend it"


def _absent(module: ModuleType, attribute: str) -> str:
    own = [
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    close = difflib.get_close_matches(attribute, own, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    file = getattr(module, "__file__", None) or module.__name__
    return f"{file} has no {attribute!r}; {hint}it has: {', '.join(own) or 'no function'}"
