"""The Lua scripts that run inside Redis, one for each step on a key.

A step is one script because other commands could run between two commands. The scripts
are files in ``lua``, and begin with ``common.lua``. The last argument identifies the
call.

A key has five names in Redis, all in one slot:

* the lock: the owner, with a time to live of ttl and grace. It is set by ``SET NX PX``;
* ``:last``: the last grant. It outlives the lock, for its token and to detect holders
  that never released the key;
* ``:line``: the owners of the queued claims, by position;
* ``:claims``: for each queued claim the data that a grant needs, and when its heartbeat
  expires;
* ``:gone``: the claims that were released or cancelled, the calls that released them,
  and when. A delayed request of such a claim has no effect.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from dlocks.backends.base import HEARTBEAT_TIMEOUT

# Values of the scripts: for how long a heartbeat counts, and for how long after that a
# waiter is only skipped, in microseconds. For how long a cancelled claim and a released
# key are remembered, in seconds. No request is delayed for longer than the former.
# After the latter, a token grows by the clock alone.
CONSTANTS = {
    "HEARTBEAT_TIMEOUT": round(HEARTBEAT_TIMEOUT * 1e6),
    "DELETE_AFTER": 10_000_000,
    "GONE_FOR": 60,
    "REMEMBERED_FOR": 86400,
}
_FOLDER = Path(__file__).with_name("lua")


class Script:
    """One script, whose ``sha`` is its name in Redis."""

    def __init__(self, name: str) -> None:
        parts = [f"local {name} = {value}\n" for name, value in CONSTANTS.items()]
        files = [_FOLDER / f"{one}.lua" for one in ("common", name)]
        common, step = [file.read_text() for file in files]
        # Each reply begins with its call.
        step = f"local function step()\n{step}end\nreturn {{call, step()}}\n"
        self.text = "".join([*parts, common, step])
        self.sha = hashlib.sha1(self.text.encode()).hexdigest()  # noqa: S324


ACQUIRE = Script("acquire")
RENEW = Script("renew")
VERIFY = Script("verify")
RELEASE = Script("release")
EXCHANGE = Script("exchange")
QUEUE = Script("queue")
LOOK = Script("look")
WAITERS = Script("waiters")
HOLDER = Script("holder")
