"""The record of a run: its directory, the ledger of what the learner consumed, and the rules for resuming from it."""
