"""What an ASGI server tells of its end, so that the process gives back what it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from dlocks.coroutines import acquiring
from dlocks.keeper import keeper

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Any, Receive, Send], Awaitable[None]]

# How long tasks are given to leave their blocks.
PATIENCE = 5.0


def release_at_shutdown(application: Application) -> Application:
    """
    Return the application with an answer to the server's ``lifespan``, which Django's own has not.

    A server may end its process by the very signal that it was told to end by: requests that have not ended in time
    are not waited for, and nothing is run at the exit. At the lifespan's shutdown, which comes before, tasks that
    hold a lock or wait for one are cancelled, and what the process still holds is given back: the next holder can
    have at once what otherwise runs out with its ttl.
    """

    async def with_lifespan(scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await application(scope, receive, send)
            return
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if tasks := {task for task in asyncio.all_tasks() if task in acquiring or keeper.keeps_for(task)}:
            for task in tasks:
                task.cancel("the server ends")
            await asyncio.wait(tasks, timeout=PATIENCE)
        await asyncio.to_thread(keeper.run, keeper.close)
        await send({"type": "lifespan.shutdown.complete"})

    return with_lifespan
