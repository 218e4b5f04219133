"""Versions in HTTP: ETag, If-Match, 412, 409 and 428."""

from __future__ import annotations

import json

import pytest
from django.http import JsonResponse
from django.test import Client, override_settings
from django.urls import path

from dlocks.optimistic.http import StaleVersionMiddleware, etag, precondition
from tests.models import Article, Comment

pytestmark = [pytest.mark.front, pytest.mark.django_db]


def view(request, pk):
    article = Article.objects.get(pk=pk)
    if refused := precondition(request, article, required="required" in request.GET):
        return refused
    if request.method == "PUT":
        if "late" in request.GET:
            Article.objects.update(title="meanwhile")
        article.title = json.loads(request.body)["title"]
        article.save()
    return JsonResponse({"title": article.title}, headers={"ETag": etag(article)})


async def async_view(request, pk):
    article = await Article.objects.aget(pk=pk)
    await Article.objects.aupdate(title="meanwhile")
    await article.asave()


urlpatterns = [path("articles/<int:pk>/", view), path("async/<int:pk>/", async_view)]


@pytest.fixture
def client():
    middleware = ["dlocks.optimistic.http.StaleVersionMiddleware"]
    with override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=middleware):
        yield Client()


@pytest.fixture
def article():
    return Article.objects.create(title="first")


def put(client, article, query="", **headers):
    url = f"/articles/{article.pk}/{query}"
    return client.put(
        url, {"title": "put"}, content_type="application/json", headers=headers
    )


def test_a_tag_is_of_one_version_of_one_row(article):
    before = etag(article)
    assert before.startswith('"')
    assert before.endswith(f'.{article.version}"')
    assert etag(Article.objects.get()) == before
    article.save()
    comment = Comment.objects.create(pk=article.pk, article=article)
    others = {etag(article), etag(Article.objects.create()), etag(comment)}
    assert len({before, *others}) == 4


def test_an_instance_without_its_version_has_no_tag(article, rf):
    """The tag of a later version would be that of other values."""
    partly = Article.objects.defer("version").get()
    article.save()
    for use in (etag, lambda one: precondition(rf.get("/"), one)):
        with pytest.raises(RuntimeError, match="without its version"):
            use(partly)


def test_a_write_with_the_tag_of_an_older_version_is_412(client, article):
    tag = client.get(f"/articles/{article.pk}/").headers["ETag"]
    first = put(client, article, **{"If-Match": tag})
    assert first.status_code == 200
    refused = put(client, article, **{"If-Match": tag})
    assert refused.status_code == 412
    assert refused.headers["ETag"] == first.headers["ETag"], "to read again and compare"
    for make in (lambda tag: tag, lambda tag: f'"x", {tag}', lambda tag: "*"):
        tag = make(etag(Article.objects.get()))
        assert put(client, article, **{"If-Match": tag}).status_code == 200
    assert Article.objects.get().title == "put"


def test_a_change_between_the_check_and_the_save_is_412_too(client, article):
    """Without If-Match, the conflict is 409. If-Match can be required."""
    refused = put(client, article, "?late", **{"If-Match": etag(article)})
    assert refused.status_code == 412
    article = Article.objects.get()
    assert article.title == "meanwhile"
    assert put(client, article, "?required").status_code == 428
    tag = {"If-Match": etag(article)}
    assert put(client, article, "?required", **tag).status_code == 200
    assert client.get(f"/articles/{article.pk}/?required").status_code == 200
    refused = put(client, article, "?late")
    assert refused.status_code == 409
    assert "was not saved" in refused.content.decode()


def test_an_unchanged_row_gets_304(client, article):
    url = f"/articles/{article.pk}/"
    tag = client.get(url).headers["ETag"]
    unchanged = client.get(url, headers={"If-None-Match": tag})
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    assert unchanged.headers["ETag"] == tag
    article.save()
    assert client.get(url, headers={"If-None-Match": tag}).status_code == 200


def test_the_projects_own_page_is_shown(client, article, tmp_path, settings):
    (tmp_path / "409.html").write_text("{{ stale.held }} is not {{ stale.found }}")
    template = {**settings.TEMPLATES[0], "DIRS": [tmp_path]}
    with override_settings(TEMPLATES=[template]):
        refused = put(client, article, "?late")
    versions = article.version, Article.objects.get().version
    assert refused.status_code == 409
    assert refused.content.decode() == "{} is not {}".format(*versions)


def test_the_middleware_ignores_other_errors(rf):
    middleware = StaleVersionMiddleware(lambda request: None)
    assert middleware.process_exception(rf.get("/"), ValueError()) is None


@pytest.mark.django_db(transaction=True)
async def test_a_conflict_in_an_async_view_is_409(client, article):
    from django.test import AsyncClient

    response = await AsyncClient().get(f"/async/{article.pk}/")
    assert response.status_code == 409
