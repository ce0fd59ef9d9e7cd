"""Serves the conversation of an episode as an endpoint with OpenAI's API."""
