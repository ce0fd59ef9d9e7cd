"""Programs of models, run where they can do no harm."""
