"""Receivers of signals."""

from contextlib import contextmanager


@contextmanager
def received(dispatcher, receiver):
    """Call a receiver for each event of a signal during the block."""
    dispatcher.connect(receiver)
    try:
        yield
    finally:
        dispatcher.disconnect(receiver)
