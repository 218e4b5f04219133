"""A headless Chromium for tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from django.test import Client
from playwright.sync_api import expect, sync_playwright

# The directory of the documentation's images, of which ``make images`` replaces the
# existing ones.
IMAGES = os.environ.get("DLOCKS_TEST_IMAGES")
# The first has no windows, and needs half the processor time of the others.
PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
# The first two features start a process for the address bar with each new window. It
# takes two seconds of processor time. The list replaces that of Playwright, so it
# repeats some features that Playwright disables too.
WITHOUT = (
    "WebUIOmniboxPopup", "WebUIOmniboxAimPopup", "AimEnabled", "HttpsUpgrades",
    "MediaRouter", "OptimizationHints", "PaintHolding",
)  # fmt: skip
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    f"--disable-features={','.join(WITHOUT)}",
)  # fmt: skip


class Browser:
    """Playwright, in a thread of its own.

    Its sync API runs an event loop in the thread that uses it. Django's ORM refuses to
    work in such a thread, and a lock would be held by the task of that loop. A test
    therefore gets proxies of Playwright's objects, which can be used from any thread.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._contexts: list[Remote] = []
        self._troubles: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for context in self._contexts:
            context.close()
        if self._troubles and error is None:
            troubles = "\n".join(self._troubles)
            raise AssertionError(f"The pages had troubles:\n{troubles}")

    def page(self, client: Client | None = None, **options: Any) -> Any:
        """Open a page in a new browser context, logged in like the test client.

        The options are those of Playwright's ``new_context()``:
        ``java_script_enabled``, ``viewport``, ``color_scheme`` and others. An error in
        the page or on its console fails the test.
        """
        context = _start().new_context(
            base_url=self.address, reduced_motion="reduce", **options
        )
        self._contexts.append(context)
        context.set_default_timeout(60_000)
        context.on("weberror", self._fail)
        context.on("console", self._hear)
        if client is not None:
            context.add_cookies([
                {"name": name, "value": crumb.value, "url": self.address}
                for name, crumb in client.cookies.items()
            ])  # fmt: skip
        return context.new_page()

    def expect(self, subject: Any) -> Any:
        """Return Playwright's assertions about a page or a locator.

        They wait until they are true.
        """
        return _thread.call(expect, subject)

    def _fail(self, error: Any) -> None:
        self._troubles.append(f"error in the page: {error.error}")

    def _hear(self, message: Any) -> None:
        kind, place = message.type, message.location
        # Chromium requests the site's icon by itself.
        if kind in {"error", "warning"} and not place["url"].endswith("/favicon.ico"):
            self._troubles.append(f"{kind} on the console: {message.text} ({place})")


def picture(subject: Any, name: str, **options: Any) -> None:
    """Take a screenshot, and save it if it is an image of the documentation."""
    taken = subject.screenshot(**options)
    if IMAGES and (kept := Path(IMAGES) / name).exists():
        kept.write_bytes(taken)
    assert len(taken) < 150_000


class Thread:
    """The thread that runs Playwright.

    It starts with the first test that needs it and stops at the end of the run.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "browser")
        self._playwright: Any = None
        self._chromium: Any = None

    def start(self) -> Remote:
        return self.call(self._start)

    def _start(self) -> Any:
        if self._chromium is None:
            path = next(filter(None, map(shutil.which, PROGRAMS)), None)
            if path is None:
                raise FileNotFoundError(
                    "chromium is not installed: apt-get install chromium"
                )
            self._playwright = sync_playwright().start()
            expect.set_options(timeout=60_000)
            self._chromium = self._playwright.chromium.launch(
                executable_path=path, args=list(FLAGS)
            )
        return self._chromium

    def stop(self) -> None:
        self.call(self._stop)

    def _stop(self) -> None:
        if self._chromium is not None:
            self._chromium.close()
        if self._playwright is not None:
            self._playwright.stop()
        self._chromium = self._playwright = None

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function in that thread and return its result.

        Proxies among the arguments are replaced by the real objects. Objects of
        Playwright are returned as proxies.
        """

        def call() -> Any:
            return function(
                *map(_real, args),
                **{name: _real(value) for name, value in kwargs.items()},
            )

        return _stand_in(self._executor.submit(call).result())


class Remote:
    """A proxy of an object that only the browser's thread may use."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        found = _thread.call(getattr, self._real, name)
        if not callable(found):
            return found
        return lambda *args, **kwargs: _thread.call(found, *args, **kwargs)


def _real(value: Any) -> Any:
    return value._real if isinstance(value, Remote) else value


def _stand_in(value: Any) -> Any:
    if isinstance(value, list):
        return [_stand_in(one) for one in value]
    return Remote(value) if type(value).__module__.startswith("playwright.") else value


_thread = Thread()
_start, stop = _thread.start, _thread.stop
