"""Checkpoints: their files, and how ranks save and restore them."""
