"""The admin of the versioned test models."""

from django.contrib import admin

from dlocks.optimistic.admin import VersionedModelAdmin, VersionedTabularInline
from tests.models import Article, Comment, Counter


class CommentInline(VersionedTabularInline):
    model = Comment
    fields = ["text", "author"]
    extra = 1


@admin.register(Article)
class ArticleAdmin(VersionedModelAdmin):
    list_display = ["id", "title", "views"]
    list_editable = ["title", "views"]
    fieldsets = [
        (None, {"fields": ["title", "body"]}),
        ("More", {"fields": ["author", "views", "version"]}),
    ]
    readonly_fields = ["version"]
    inlines = [CommentInline]
    actions = ["lose"]

    def lose(self, request, queryset):
        """Read an article, change it behind its back, and save it."""
        self.lost = getattr(self, "lost", 0) + 1
        article = queryset.get()
        queryset.update(title="theirs")
        article.save()


admin.site.register(Counter)
