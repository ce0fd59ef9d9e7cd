"""Pages made from the code, so that they cannot go stale: `make docs` writes them, a test compares them."""

NOTE = "<!-- Made by `make docs` from the code; edit the docstrings there. -->"


def cell(text: str) -> str:
    """One line that a Markdown table can hold."""
    return " ".join(text.split()).replace("|", "\\|")
