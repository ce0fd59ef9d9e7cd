"""Episodes of a rollout worker: an environment's messages become exact prompts, and sampled tokens become rows."""
