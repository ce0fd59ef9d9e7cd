"""The tests that docs/security.md names are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
PROOFS = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "security.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("path", "name"), PROOFS)
def test_a_promise_has_the_test_that_it_names(path, name):
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


def test_promises_are_found():
    assert len(PROOFS) > 20
