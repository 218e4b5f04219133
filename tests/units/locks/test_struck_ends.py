"""Interrupts at each moment of an end that nothing else would repeat."""

from __future__ import annotations

import gc
import itertools
from functools import partial

import pytest
from django.http import StreamingHttpResponse
from django.test import RequestFactory

from dlocks import db_lock, locked_view
from tests.internals import requests

pytest_plugins = ["tests.moments"]
pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]

LOCK = db_lock("stock:7", using="memory")


@pytest.fixture
def end_at_each_moment(strike_in_dlocks, is_busy, until):
    """Return a function that interrupts an end, and waits until the key is free."""

    def end(begin, within):
        for number in itertools.count():
            struck = strike_in_dlocks(number, begin(), None, within)
            # A traceback refers to what has ended.
            gc.collect()
            until(lambda: not is_busy("stock:7", "memory"))
            if not struck:
                break
        assert number > 5

    return end


def test_the_end_of_a_response(end_at_each_moment):
    """The response does not keep the key after its own end."""

    @locked_view("stock:7", using="memory")
    def view(request):
        return StreamingHttpResponse([b"sold"])

    def begin():
        return view(RequestFactory().get("/")).close

    end_at_each_moment(begin, ("responses", "core/hold"))


def test_the_end_of_a_block_within_a_request(end_at_each_moment):
    """The garbage collector closes a generator there. A worker sends the release."""

    def generate():
        with LOCK:
            yield

    def begin():
        generator = generate()
        next(generator)
        return partial(requests.request, generator.close)

    end_at_each_moment(begin, ("core/hold", "core/life"))
