"""The listener for notifications that Redis sends to this process."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import redis

from dlocks.backends.notifiers import Notifier
from dlocks.backends.redis.requests import TROUBLE, RedisRequests


class RedisNotifier(Notifier):
    """A listener that receives the notifications of one channel."""

    def __init__(self, backend: RedisRequests, client: Any, channel: str) -> None:
        self._failure = backend._failure
        self._subscription = client.pubsub()
        self._subscription.subscribe(channel)
        # No notification that is sent after this confirmation is missed.
        if self._subscription.get_message(timeout=backend.socket_timeout) is None:
            self.close()
            raise redis.TimeoutError("Timeout subscribing")

    def wait(self, timeout: float) -> bool:
        try:
            # After a reconnect, the confirmation of the new subscription arrives as
            # well. A grant before it was not notified.
            message = first = self._subscription.get_message(timeout=timeout)
            while True:
                if message is None:
                    break
                message = self._subscription.get_message(timeout=0)
        except TROUBLE as error:
            raise self._failure(error) from error
        return first is not None

    def close(self) -> None:
        with suppress(*TROUBLE):
            self._subscription.close()
