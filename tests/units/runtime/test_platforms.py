"""Platforms that lack what others have."""

from __future__ import annotations

import pytest

from tests.scripts import run_script

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.engine("sqlite")
def test_locks_need_nothing_that_windows_lacks():
    done = run_script(
        before="""
        import asyncio, concurrent.futures, logging, os, select, selectors, socket
        import sys, threading, time, unittest
        import django.core.handlers.asgi, django.db.backends.sqlite3.base, django.test
        sys.platform = "win32"
        for module, names in {
            os: "fork getuid register_at_fork sched_yield",
            select: "poll epoll",
            socket: "AF_UNIX",
            time: "clock_gettime CLOCK_BOOTTIME CLOCK_MONOTONIC CLOCK_REALTIME",
        }.items():
            for name in names.split():
                delattr(module, name)
        """,
        script="""
        from django.db import connections
        from dlocks import db_lock
        from dlocks.backends.database import notify
        # There is no /proc.
        notify.this_host = lambda: ""
        def wait():
            with db_lock("stock:7", timeout=20) as hold:
                tokens.append(hold.token)
            connections.close_all()
        tokens = []
        with db_lock("stock:7", ttl=1.5) as hold:
            thread = threading.Thread(target=wait)
            thread.start()
            time.sleep(2)
            hold.check()
        thread.join()
        print(tokens[0] > hold.token)
        """,
    )
    assert done.stdout == "True\n", done.stderr
    # Python 3.13 warns of unclosed connections, so stderr need not be empty.
    assert "Traceback" not in done.stderr
