"""The pictures of docs/debugging.md and of the pages around it, made by real runs of the quickstart that are ill on purpose.

`python -m tests.pictures` draws them from the numbers in `numbers/`; `python -m tests.pictures stale` runs `stale` again first.
"""
