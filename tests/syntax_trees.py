"""Python's syntax trees of many files."""

import ast
import gc


def tree(source: str) -> ast.Module:
    """No garbage is collected meanwhile: a destructor that logs a traceback parses its lines, and Python 3.11 takes two parsers for one."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if was_on:
            gc.enable()
