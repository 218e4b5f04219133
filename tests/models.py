"""The models that tests work on."""

import uuid

from django.db import models
from django.db.models.functions import Length

from dlocks.optimistic import (
    FencedModel,
    VersionedManager,
    VersionedModel,
    VersionField,
)


class Counter(models.Model):
    name = models.CharField(max_length=50, unique=True)
    value = models.IntegerField(default=0)

    def __str__(self) -> str:
        return self.name


class Article(VersionedModel):
    """A versioned row that users edit."""

    title = models.CharField(max_length=50, default="")
    body = models.TextField(blank=True, default="")
    views = models.IntegerField(default=0)
    changed_at = models.DateTimeField(auto_now=True)
    author = models.ForeignKey(
        Counter, models.SET_NULL, null=True, blank=True, related_name="articles"
    )

    def __str__(self) -> str:
        return self.title


class Report(Article):
    """An article with a table of its own. The version is in its parent's table."""

    pages = models.IntegerField(default=0)


class ArticleProxy(Article):
    class Meta:
        proxy = True


class Place(models.Model):
    name = models.CharField(max_length=50)

    def __str__(self) -> str:
        return self.name


class Restaurant(Place, VersionedModel):
    """A versioned child of an unversioned parent. The version is in its own table."""

    stars = models.IntegerField(default=0)

    # The first base class has Django's default manager.
    objects = VersionedManager()  # type: ignore[misc]

    class Meta(VersionedModel.Meta):
        pass


class Page(VersionedModel):
    """A model with its own key, its own version field and an unversioned field.

    Anyone may overwrite ``hits``. The database computes ``length``.
    """

    version = None
    lock_version = VersionField(ignore_fields=["hits"])

    slug = models.CharField(max_length=50, primary_key=True)
    text = models.TextField(default="")
    hits = models.IntegerField(default=0)
    length = models.GeneratedField(
        expression=Length("text"), output_field=models.IntegerField(), db_persist=True
    )

    def __str__(self) -> str:
        return self.slug


class Seat(VersionedModel):
    """A model with a composite primary key of two columns."""

    pk = models.CompositePrimaryKey("row", "number")
    row = models.IntegerField()
    number = models.IntegerField()
    guest = models.CharField(max_length=50, default="")

    def __str__(self) -> str:
        return self.guest


class Album(VersionedModel):
    """A model whose related rows are in a table of their own."""

    authors = models.ManyToManyField(Counter, blank=True)

    def __str__(self) -> str:
        return str(self.pk)


class Badge(VersionedModel):
    """A model with a default for its key, whose rows Django looks for before a save."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    title = models.CharField(max_length=50, default="")

    class Meta(VersionedModel.Meta):
        select_on_save = True

    def __str__(self) -> str:
        return self.title


class Comment(VersionedModel):
    """A model that the admin shows inline."""

    article = models.ForeignKey(Article, models.CASCADE, related_name="comments")
    text = models.CharField(max_length=50)
    author = models.CharField(max_length=50, blank=True, default="")

    def __str__(self) -> str:
        return self.text


class Chapter(models.Model):
    def __str__(self) -> str:
        return str(self.pk)


class OnlyOpen(models.Model):
    """A mixin that compares another field, and passes its arguments by keyword."""

    ARGUMENTS = (
        "using", "pk_val", "values", "update_fields", "forced_update",
        "returning_fields",
    )  # fmt: skip

    class Meta:
        abstract = True

    def _do_update(self, base_qs, *args, **kwargs):
        kwargs |= dict(zip(self.ARGUMENTS, args, strict=False))
        return super()._do_update(base_qs=base_qs.exclude(text="closed"), **kwargs)


def clear_editor(collector, field, sub_objs, using):
    collector.add_field_update(field, None, sub_objs)


class Note(OnlyOpen, VersionedModel):
    """A versioned row that Django and a mixin write in unusual ways."""

    chapter = models.ForeignKey(Chapter, models.CASCADE)
    editor = models.ForeignKey(Counter, clear_editor, null=True)
    text = models.CharField(max_length=50, default="")
    # Names that a base class may not use itself.
    condition = models.CharField(max_length=50, default="")
    advance = models.IntegerField(default=0)

    class Meta(VersionedModel.Meta):
        order_with_respect_to = "chapter"

    def __str__(self) -> str:
        return self.text


class Footnote(models.Model):
    """An unversioned model that is deleted together with its article."""

    article = models.ForeignKey(Article, models.CASCADE, related_name="footnotes")

    def __str__(self) -> str:
        return str(self.pk)


class Machine(FencedModel):
    """A row that is written under a lock."""

    state = models.CharField(max_length=50, default="")
    steps = models.IntegerField(default=0)

    def __str__(self) -> str:
        return self.state


class Robot(Machine):
    """A fenced child of a fenced parent. The fence is in its parent's table."""

    arms = models.IntegerField(default=2)


class Crane(FencedModel, Place):
    """A fenced child of an unfenced parent. The fence is in its own table."""

    steps = models.IntegerField(default=0)
