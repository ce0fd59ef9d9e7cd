"""What a run leaves behind: its directory, the ledger of what the learner consumed, and the rules for going on from it."""
