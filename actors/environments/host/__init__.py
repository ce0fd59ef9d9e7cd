"""Host processes, which run environments, and both ends of their pipes."""
