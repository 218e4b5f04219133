"""A row for tests to work on under a lock."""

from django.db import models


class Counter(models.Model):
    name = models.CharField(max_length=50, unique=True)
    value = models.IntegerField(default=0)

    def __str__(self) -> str:
        return self.name
