"""Reports about runs, for people."""
