"""What ``manage.py lock_bench`` is made of: processes, what they saw, and a picture of it."""
