"""Row versions in HTTP: ETag, If-Match, and the response to a conflict."""

from __future__ import annotations

import hashlib
from typing import Any

from django.db import models
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.template import TemplateDoesNotExist
from django.template.loader import render_to_string
from django.utils.cache import get_conditional_response
from django.utils.deprecation import MiddlewareMixin

from dlocks.exceptions import StaleVersion
from dlocks.optimistic.version_field import version_of


def etag(instance: models.Model) -> str:
    """Return the entity tag of the row as it was read.

    It is a strong tag, which no other row and no other version has.
    """
    row = f"{instance._meta.concrete_model._meta.label_lower}:{instance.pk}"  # type: ignore[union-attr]
    digest = hashlib.sha256(row.encode()).hexdigest()[:16]
    return f'"{digest}.{version_of(instance)}"'


def precondition(
    request: HttpRequest, instance: models.Model, *, required: bool = False
) -> HttpResponseBase | None:
    """Return a response if the row does not meet the request's conditions.

    Return None if the request can proceed. The status is 412 for If-Match with another
    version, and for If-None-Match with this version unless it is a GET. It is 304 for a
    GET with If-None-Match. If ``required``, it is 428 for a write without If-Match. Use
    the same instance for the write, since its ``save()`` refuses changes in between.
    """
    is_write = request.method not in {"GET", "HEAD", "OPTIONS", "TRACE"}
    if required and is_write and "If-Match" not in request.headers:
        return HttpResponse(
            "This request needs an If-Match header.",
            status=428,
            content_type="text/plain",
        )
    tag = etag(instance)
    response = get_conditional_response(request, etag=tag)
    if response is not None:
        response.headers["ETag"] = tag
    return response


class StaleVersionMiddleware(MiddlewareMixin):
    """A middleware that answers a StaleVersion that no view has caught.

    The status is 412 for a request with If-Match, and 409 otherwise. The page is the
    project's template ``409.html`` or ``412.html`` if it exists, with the error as
    ``stale``.
    """

    def process_exception(
        self, request: HttpRequest, exception: Exception
    ) -> HttpResponse | None:
        if not isinstance(exception, StaleVersion):
            return None
        status = 412 if "If-Match" in request.headers else 409
        context: dict[str, Any] = {"stale": exception}
        try:
            return HttpResponse(
                render_to_string(f"{status}.html", context, request), status=status
            )
        except TemplateDoesNotExist:
            return HttpResponse(
                "This object has changed in the meantime and was not saved. Load it"
                " again and repeat your change.",
                status=status,
                content_type="text/plain",
            )
