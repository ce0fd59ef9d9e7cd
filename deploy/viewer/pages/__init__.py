"""One page a file, each with `ROUTES`."""
