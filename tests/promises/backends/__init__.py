"""Tests of the backends on servers that Django has no database for.

Run them with `make test-backends`.
"""
