"""A wrapper for ASGI applications that releases locks when the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dlocks.core.callers import holds_any
from dlocks.runtime import clock
from dlocks.runtime.coroutines import acquiring
from dlocks.runtime.keeper import shutdown
from dlocks.runtime.pools import call_privately
from dlocks.runtime.waits import waits

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Any, Receive, Send], Awaitable[None]]

# Seconds for which cancelled tasks may take to leave their blocks.
CANCEL_TIMEOUT = 5.0


def release_at_shutdown(application: Application) -> Application:
    """Return the application with a handler for the server's ``lifespan``.

    Django's own application has no such handler.

    A server may end its process by the same signal that stopped the server. It then
    neither waits for requests that are still running nor runs exit handlers. The
    lifespan's shutdown comes before that. Tasks that hold a lock or wait for one are
    cancelled. Then ``shutdown()`` is called: threads that wait for a lock end with
    LockShutDown, elections are stopped, and the process's remaining holds are released.
    If a thread is still in the block of one, that block ends with LockLost.
    The next holder acquires such a key at once instead of after its ttl.
    """

    async def with_lifespan(scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await application(scope, receive, send)
            return
        await receive()
        # A process may start several servers, one after the other.
        waits.resume()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        tasks = {
            task for task in asyncio.all_tasks() if task in acquiring or holds_any(task)
        }
        for task in tasks:
            task.cancel("The server is shutting down.")
        await clock.wait_for_any(
            [asyncio.gather(*tasks, return_exceptions=True)], CANCEL_TIMEOUT
        )
        # The threads of the loop may all be busy.
        executor = ThreadPoolExecutor(1)
        # The server limits the time of a shutdown.
        leave = executor.submit(call_privately, shutdown)
        await asyncio.wrap_future(leave)
        await send({"type": "lifespan.shutdown.complete"})

    return with_lifespan
