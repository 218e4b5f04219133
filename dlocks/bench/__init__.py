"""The parts of ``manage.py lock_bench``: processes, samples and figures."""
