"""From a ticket to a group in the buffer: which groups may start, which worker samples them, which service scores them."""
