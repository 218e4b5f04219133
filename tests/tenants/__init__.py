"""A Django project with django-tenants in its own process.

tests/promises/database/test_tenants.py uses it.
"""
