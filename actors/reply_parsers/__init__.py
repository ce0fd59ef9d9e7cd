"""Parsers of tool calls in a reply, for models whose chat template proves none.

A parser is a function of `text` and `tools` that returns (words, calls): the words without the calls, and each call as a dict with `name`
and `arguments`. A ValueError of it is a malformed call, which goes back to the model.
"""
