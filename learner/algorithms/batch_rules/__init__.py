"""Rules over the whole batch of a step: what is shaped, what trains, and how token losses become one number."""
