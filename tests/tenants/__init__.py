"""A Django project with django-tenants in its own process.

tests/sql/test_tenants.py uses it.
"""
