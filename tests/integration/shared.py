"""One folder for all processes that run these tests together: xdist's, and those of tests marked `own_process`."""

import os
from pathlib import Path

import pytest

SHARED = "TREADWHEEL_TEST_SHARED"
"""Names it to a process of tests that another one starts."""


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    if SHARED in os.environ:
        return Path(os.environ[SHARED])
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
