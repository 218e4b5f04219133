import asyncio

from asgiref.sync import sync_to_async
from django.http import HttpResponse

from dlocks import db_lock
from tests.models import Counter


def increment(request):
    """Read, then write, under a lock: the view that ATOMIC_REQUESTS makes lose updates elsewhere."""
    with db_lock("counter") as hold:
        counter = Counter.objects.get(name="views")
        counter.value += 1
        counter.save()
    return HttpResponse(hold.scope)


async def aincrement(request):
    async with db_lock("counter") as hold:
        counter = await Counter.objects.aget(name="views")
        counter.value += 1
        await counter.asave()
    return HttpResponse(hold.scope)


async def gathered(request):
    """Let two tasks and the sync code of one request want the same key."""
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
