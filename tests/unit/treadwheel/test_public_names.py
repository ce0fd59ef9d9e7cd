"""The interface, name by name: what changes here changes for everyone.

`python -m tests.unit.treadwheel.test_public_names` writes it down anew.
"""

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import treadwheel

FILE = Path(__file__).with_name("public_names.txt")


def described() -> Iterator[str]:
    for name in sorted(treadwheel.__all__):
        value = getattr(treadwheel, name)
        if inspect.isclass(value) and not issubclass(
            value, treadwheel.RunConfig
        ):  # its settings are a page of their own
            yield f"class {name}"
            ours = [each for each in value.__mro__ if each.__module__.startswith(("cluster.", "treadwheel."))]
            members = {name: member for each in reversed(ours) for name, member in vars(each).items()}
            yield from (f"    {name}{_shown(member)}" for name, member in sorted(members.items()) if name[0] != "_")
        else:
            yield f"{name}{_shown(value)}"


def _shown(value: object) -> str:
    if callable(value) and not inspect.isclass(value):
        try:
            return str(inspect.signature(value))
        except (TypeError, ValueError):
            return ""
    return ""


def test_names_and_signatures_are_the_ones_that_are_written_down():
    assert "\n".join(described()) + "\n" == FILE.read_text()


def test_nothing_heavy_is_imported_before_a_run_starts():
    heavy = "print([each for each in ('ray', 'torch', 'vllm', 'transformers') if each in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", f"import sys, treadwheel; {heavy}"], capture_output=True, check=True)
    assert ran.stdout == b"[]\n"


if __name__ == "__main__":
    FILE.write_text("\n".join(described()) + "\n")
