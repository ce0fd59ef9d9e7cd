from pathlib import Path

import pytest
import torch

from tests.models import make_tiny_model


def pytest_runtest_setup() -> None:
    """Random weights and inputs are the same in every run, whichever tests the process ran before."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))
