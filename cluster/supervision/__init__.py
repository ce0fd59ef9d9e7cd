"""Failures, placement and the number of workers. Decisions are pure; one place executes them."""
