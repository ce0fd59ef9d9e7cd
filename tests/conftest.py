"""Settings for all tests."""

from hypothesis import settings

# A busy machine takes long over an example now and then.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
