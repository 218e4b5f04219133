"""Threads, clocks and process hooks: what runs beside the callers."""
