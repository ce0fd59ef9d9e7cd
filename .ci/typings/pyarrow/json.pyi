# pyarrow ships no types: Any, so that strict mode speaks of our own mistakes.
from typing import Any

def __getattr__(name: str) -> Any: ...
