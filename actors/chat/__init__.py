"""Chat templates: messages to tokens, and sampled tokens back to messages."""
