"""Programs of Debian that some tests are run with. A machine without one skips them and says which package it is; CI fails."""

import os
import shutil

import pytest


def needs(program: str, *, package: str) -> pytest.MarkDecorator:
    is_missing = shutil.which(program) is None and "CI" not in os.environ
    return pytest.mark.skipif(is_missing, reason=f"`{program}` is missing: apt-get install {package}")
