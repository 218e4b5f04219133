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
