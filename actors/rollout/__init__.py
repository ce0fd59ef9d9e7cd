"""A rollout worker and its engine."""
