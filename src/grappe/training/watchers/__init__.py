"""Watchers: callbacks that follow a training without changing what is learned."""
