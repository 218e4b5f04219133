"""How waiters of a database are notified."""
