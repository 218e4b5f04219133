"""A database backend that derives from Django's PostgreSQL backend.

Those of PostGIS and django-tenants do the same.
"""

from django.db.backends.postgresql import base


class DatabaseWrapper(base.DatabaseWrapper):
    """Django's backend under another name."""
