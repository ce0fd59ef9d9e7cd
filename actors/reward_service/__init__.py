"""The reward service, and the processes that its judges run in."""
