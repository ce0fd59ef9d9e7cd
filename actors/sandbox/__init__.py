"""Runs programs written by models under confinement."""
