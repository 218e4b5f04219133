import asyncio

from asgiref.sync import sync_to_async
from django.forms import modelform_factory
from django.http import HttpResponse
from django.template import RequestContext, Template

from dlocks import db_lock
from dlocks.optimistic.forms import VersionedModelForm
from tests.models import Article, Counter


def increment(request):
    """Read and write a counter under a lock.

    With ATOMIC_REQUESTS, a view like this loses updates under locks that are released
    before the commit.
    """
    with db_lock("counter") as hold:
        counter = Counter.objects.get(name="views")
        counter.value += 1
        counter.save()
    return HttpResponse(hold.scope)


async def gathered(request):
    """Let tasks and sync code of one request compete for the same key."""
    order = []

    async def coroutine():
        async with db_lock("gathered", timeout=30):
            await asyncio.sleep(0)
            order.append("coroutine")

    @sync_to_async
    def sync():
        with db_lock("gathered", timeout=30):
            order.append("sync")

    await asyncio.gather(coroutine(), sync(), coroutine(), sync())
    return HttpResponse(" ".join(order))


# The page of a plain form, as the documentation shows it.
PAGE = """<!doctype html><html lang="en"><title>Article</title>
<link rel="icon" href="data:,">{{ form.media }}
<form method="post">{% csrf_token %}
{% if form.conflict %}{{ form.conflict }}{% endif %}
{{ form }}<button name="_save">Save</button></form></html>"""


def edit_article(request, pk):
    article = Article.objects.get(pk=pk)
    form_class = modelform_factory(
        Article, VersionedModelForm, fields=["title", "body", "views"]
    )
    form = form_class(request.POST or None, instance=article)
    if form.is_valid():
        form.save()
        return HttpResponse("Saved")
    context = RequestContext(request, {"form": form})
    return HttpResponse(Template(PAGE).render(context))
