"""The backends, in which locks are stored."""
