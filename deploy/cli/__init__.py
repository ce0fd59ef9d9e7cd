"""The command `treadwheel`: one subcommand per verb. A verb parses, calls and prints; heavy imports stay inside verbs that need them."""

import errno
import io
import os
import sys

try:
    from deploy.cli import running, preparing, looking, viewing  # isort: skip  (the order of --help)
    from deploy.cli.application import app
except KeyboardInterrupt:  # the imports take a second
    print("treadwheel: interrupted", file=sys.stderr)
    sys.exit(130)

__all__ = ["app", "looking", "main", "preparing", "running", "viewing"]


def main() -> None:
    # Users' own rewards and prompt sources lie in the current folder. It comes last, so that a json.py there does not replace Python's.
    try:
        sys.path.append(os.getcwd())
    except OSError as error:
        print(f"treadwheel: the current folder cannot be used: {error.strerror}; change to another", file=sys.stderr)
        sys.exit(2)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path may hold bytes that are no UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="treadwheel")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"treadwheel: {error}; free space, then start the same command again", file=sys.stderr, flush=True)
        os._exit(1)  # Python's own end would try to write again
