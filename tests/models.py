"""Rows for tests to work on."""

from django.db import models

from dlocks.optimistic import FencedModel, VersionedManager, VersionedModel, VersionField, microseconds


class Counter(models.Model):
    name = models.CharField(max_length=50, unique=True)
    value = models.IntegerField(default=0)

    def __str__(self) -> str:
        return self.name


class Article(VersionedModel):
    """A row that people edit."""

    title = models.CharField(max_length=50, default="")
    body = models.TextField(blank=True, default="")
    views = models.IntegerField(default=0)
    changed_at = models.DateTimeField(auto_now=True)
    author = models.ForeignKey(Counter, models.SET_NULL, null=True, blank=True, related_name="articles")

    def __str__(self) -> str:
        return self.title


class Report(Article):
    """An article with a table of its own: the version is in its parent's."""

    pages = models.IntegerField(default=0)


class ArticleProxy(Article):
    class Meta:
        proxy = True


class Place(models.Model):
    name = models.CharField(max_length=50)

    def __str__(self) -> str:
        return self.name


class Restaurant(Place, VersionedModel):
    """The version is in the child's table; the parent has none."""

    stars = models.IntegerField(default=0)

    # Its first base has the plain manager that Django makes.
    objects = VersionedManager()  # type: ignore[misc]

    class Meta(VersionedModel.Meta):
        pass


class Page(VersionedModel):
    """A key of its own, a version of another name, and a field that anybody may write over."""

    version = None
    lock_version = VersionField(start=microseconds, ignore_fields=["hits"])

    slug = models.CharField(max_length=50, primary_key=True)
    text = models.TextField(default="")
    hits = models.IntegerField(default=0)

    def __str__(self) -> str:
        return self.slug


class Seat(VersionedModel):
    """A key of two columns."""

    pk = models.CompositePrimaryKey("row", "number")
    row = models.IntegerField()
    number = models.IntegerField()
    guest = models.CharField(max_length=50, default="")

    def __str__(self) -> str:
        return self.guest


class Comment(VersionedModel):
    """What the admin shows inline."""

    article = models.ForeignKey(Article, models.CASCADE, related_name="comments")
    text = models.CharField(max_length=50)

    def __str__(self) -> str:
        return self.text


class Footnote(models.Model):
    """Not versioned; goes with its article."""

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
    """The fence is in the parent's table."""

    arms = models.IntegerField(default=2)


class Crane(FencedModel, Place):
    """The fence is in the child's table; the parent has none."""

    steps = models.IntegerField(default=0)
