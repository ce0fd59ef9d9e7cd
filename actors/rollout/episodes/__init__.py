"""Episodes of a rollout worker: what environments ask becomes exact prompts, and what the model samples becomes rows."""
