"""`treadwheel`: one command a verb. Parses, calls, prints; imports what is heavy only in the verb that needs it."""

import os
import sys

from deploy.cli import running, preparing, looking, viewing  # isort: skip  (the order of --help)
from deploy.cli.application import app

__all__ = ["app", "looking", "main", "preparing", "running", "viewing"]


def main() -> None:
    # Your own rewards and prompt sources lie where you stand. Last, so that a file named json.py is not taken for Python's.
    sys.path.append(os.getcwd())
    app(prog_name="treadwheel")
