"""Metric sinks, one file each, named in `metrics.sinks`. A factory takes `directory`, `num_steps` and its own parameters."""
