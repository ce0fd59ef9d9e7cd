"""From a run file to a validated configuration."""
