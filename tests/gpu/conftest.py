"""Engines leave here what they leave in tests of integration, and it is put back the same way."""

from tests.integration.conftest import _leaves_no_trace  # noqa: F401  a fixture
