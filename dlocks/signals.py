"""
Signals about locks. The sender is the ``Lock``'s class.

``lock_acquired``, ``lock_released``, ``lock_lost`` and ``lock_detached`` carry ``hold``; ``lock_timeout`` carries
``lock``, ``holder`` and ``waited``. A nested entry and its end are not signalled. What a receiver raises is
logged, and does not reach the caller. ``lock_lost`` may be sent from the keeper's thread.
"""

from django.dispatch import Signal

lock_acquired = Signal(use_caching=True)
lock_released = Signal(use_caching=True)
lock_lost = Signal()
lock_detached = Signal()
lock_timeout = Signal()
