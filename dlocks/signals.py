"""
Signals about locks. The sender is the ``Lock``'s class.

``lock_acquired``, ``lock_released`` and ``lock_lost`` carry ``hold``; ``lock_timeout`` carries ``lock`` and ``holder``.
A nested entry and its end are not signalled. What a receiver raises is logged, and does not reach the caller.
``lock_lost`` may be sent from the keeper's thread.
"""

from django.dispatch import Signal

lock_acquired = Signal()
lock_released = Signal()
lock_lost = Signal()
lock_timeout = Signal()
