"""The record of a run: its directory, the ledger of the groups that the learner consumed, and the rules for resuming from it."""
