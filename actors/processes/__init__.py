"""Processes that run code of a user's: JSON lines in and out, confined, ended with all that they start."""
