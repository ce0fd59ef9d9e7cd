"""Processes that run a user's code: they speak in JSON lines, are confined, and end with all their descendants."""
