"""Prompts to tokens and back."""
