"""Processes that run environments, and both ends of the pipes to them."""
