"""Checkpoints: the files, and when they are written."""
