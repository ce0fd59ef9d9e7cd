"""The networks: loading, sharding, LoRA, attention over packed rows, and log-probs without the logits of a whole batch."""
