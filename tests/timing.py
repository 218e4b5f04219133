"""Promises about time, and machines that stand still now and then."""

from __future__ import annotations


class TooLateError(AssertionError):
    """
    Something took longer than is promised.

    A machine that stood still for a while looks the same, so the test runs again, twice at most (``--only-rerun``). No
    other failure has a second chance: a promise of safety that is broken once is broken.
    """


def in_time(seconds: float, limit: float) -> None:
    """Fail if something took so many seconds, and that is not less than the limit."""
    if not seconds < limit:
        raise TooLateError(f"It took {seconds:.3f} s, and less than {limit:.3f} s are promised.")
