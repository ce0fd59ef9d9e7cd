"""Reads prompts of a source that may be a user's own: whatever is wrong with one is one error that names it."""

import json
from typing import Any

from cluster.contracts.errors import DataError, TreadwheelError
from cluster.contracts.foreign import described, line_of
from cluster.contracts.protocols import PromptSource
from cluster.contracts.types import Prompt

_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def prompt_at(source: PromptSource, index: int) -> Prompt:
    """Prompt `index` of the source.

    Raises DataError if reading it raises an error, if it is no Prompt with an id and messages or a text, and for columns or messages that
    JSON cannot represent: judges and the record read them as JSON.
    """
    try:
        found: Any = source[index]
    except TreadwheelError:
        raise
    except Exception as error:  # foreign code
        raise DataError(f"prompt {index} cannot be read: {described(error)}{line_of(error)}") from error
    if not isinstance(found, Prompt):
        raise DataError(
            f"prompt {index} is of type {type(found).__name__}; it must be a cluster.contracts.types.Prompt"
        )
    if why := _why_refused(found):
        raise DataError(f"prompt {index}: {why}", prompt_id=str(found.prompt_id))
    return found


def _why_refused(prompt: Any) -> str | None:
    prompt_id, text, messages = prompt.prompt_id, prompt.text, prompt.messages
    if not isinstance(prompt_id, str) or not prompt_id:
        return f"prompt_id={prompt_id!r:.80} must be a text that is not empty"
    if not isinstance(text, str | None) or not isinstance(messages, list | None) or text is messages is None:
        return f"messages={messages!r:.80} must be a list, or text={text!r:.80} a text"
    read_as_json: dict[str, Any] = {"prompt_id": prompt_id, "text": text, "messages": messages, **prompt.columns}
    if _why_no_json(read_as_json) is None:
        return None
    for name, value in read_as_json.items():
        if why := _why_no_json({name: value}):
            return f"{name}={value!r:.80} has no JSON ({why}); give texts, numbers, lists, mappings or None"
    return None


def _why_no_json(value: Any) -> str | None:
    try:
        _JSON.encode(value).encode()
    except (TypeError, ValueError) as error:  # UnicodeEncodeError is a ValueError
        return described(error)
    return None
