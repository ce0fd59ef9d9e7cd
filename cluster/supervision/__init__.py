"""Failures and sizes: deciding is pure, doing is in one place."""
