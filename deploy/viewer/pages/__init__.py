"""One page per file, each with `ROUTES`."""
