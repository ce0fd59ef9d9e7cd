"""Ray's edge: the only folder of `cluster` that starts and calls Ray actors."""
