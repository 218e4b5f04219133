"""Benchmarks of dlocks and its peers, in one run: ``python -m benchmarks``."""
