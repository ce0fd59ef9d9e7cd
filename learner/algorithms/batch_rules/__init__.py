"""Rules over the whole batch of a step: shaping, filters, and aggregation of token losses to one number."""
