"""The rules of a backend as a test suite. To test your own backend, copy this folder.

It needs nothing of this project's other tests.
"""

from .suite import BackendContract

__all__ = ["BackendContract"]
