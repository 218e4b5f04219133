"""Locks, holds and how they are acquired."""
