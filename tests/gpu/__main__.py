"""`make test-gpu`, or `python -m tests.gpu -k learner`: all tests marked `gpu`. Without a GPU none runs, and it ends with 1."""

import sys

import pytest
import torch

PLACES = ("tests/gpu", "tests/integration/test_lora.py", "tests/unit/learner/model")
"""Where such tests are."""
_WITHOUT = (
    "make test-gpu: torch sees no GPU here, so nothing was proven; it takes a machine with one, and make install GPU=1"
)


def main() -> int:
    if not torch.cuda.is_available():
        print(_WITHOUT, file=sys.stderr)
        return 1
    return pytest.main(["-q", "-m", "gpu", "--durations", "20", *PLACES, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
