"""A Django project with django-tenants in its own process.

tests/test_tenants.py uses it.
"""
