"""A run's actors on a Ray cluster: placed, brought up, steered, taken down."""
