"""Judging by language models: the rubric file, the question, and the answer."""
