"""The conversation of an episode as an endpoint that speaks OpenAI's API."""
