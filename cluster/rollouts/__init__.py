"""From a ticket to a group in the buffer: what may start, who samples it, who scores it."""
