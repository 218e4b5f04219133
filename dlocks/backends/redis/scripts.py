"""The Lua scripts that run inside Redis, one for each step on a key.

A step is one script because other commands could run between two commands.

A key has five names in Redis, all in one slot:

* the lock: the owner, with a time to live of ttl and grace. It is set by ``SET NX PX``;
* ``:last``: the last grant. It outlives the lock, for its token and to detect holders
  that never released the key;
* ``:line``: the owners of the queued claims, by position;
* ``:claims``: for each queued claim the data that a grant needs, and when its heartbeat
  expires;
* ``:gone``: the claims that were cancelled before they were granted, and when. A
  delayed request of such a claim has no effect.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from dlocks.backends.base import HEARTBEAT_TIMEOUT

# Seconds for which a released key is remembered. Afterwards its token grows by the
# clock alone.
REMEMBERED_FOR = 86400
# Seconds for which a cancelled claim is remembered. No request is delayed for longer.
GONE_FOR = 60
# Seconds after its last heartbeat has expired until a waiter is removed from the queue.
# Until then it is only skipped.
DELETE_AFTER = 10

_COMMON = f"""
local lock, last, line, claims, gone = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local grace, settle, me = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local function text(number)
  return string.format('%.0f', number)
end

-- Whether the lease is live. The key of Redis outlives it by the grace.
local function holds(owner)
  return redis.call('GET', lock) == owner and redis.call('PTTL', lock) > grace
end

local function write(owner, holder, ip, ttl)
  local token = math.max(now, (tonumber(redis.call('HGET', last, 'token')) or 0) + 1)
  redis.call('HSET', last, 'token', text(token), 'status', 'P', 'owner', owner,
        'holder', holder, 'ip', ip,
    'since', text(now), 'ends', text(now + ttl * 1000), 'count', 1)
  redis.call('PERSIST', last)
  return text(token)
end

local function heard(owner)
  redis.call('HSET', claims, 'heard:' .. owner,
    text(now + {round(HEARTBEAT_TIMEOUT * 1e6)}))
  redis.call('PEXPIRE', claims, 60000)
  redis.call('PEXPIRE', line, 60000)
end

local function stand_down(owner)
  redis.call('HDEL', claims, owner, 'heard:' .. owner)
  return redis.call('ZREM', line, owner) == 1
end

-- The first claim in the queue with a recent heartbeat. Old claims are deleted.
local function first()
  local place = 0
  while true do
    local owner = redis.call('ZRANGE', line, place, place)[1]
    if not owner then return nil end
    local until_then = tonumber(redis.call('HGET', claims, 'heard:' .. owner)) or 0
    if until_then > now then return owner end
    if until_then + {DELETE_AFTER * 1_000_000} < now then
            stand_down(owner)
        else
            place = place + 1
        end
  end
end

-- Whether the server started so recently that a lock it may have lost in a restart may
-- still be held.
local function is_young()
  if settle == 0 then return false end
  local info = redis.call('INFO', 'server')
    return tonumber(string.match(info, 'uptime_in_seconds:(%d+)')) <= settle
end

local function is_stale()
  return redis.call('HGET', last, 'status') == 'P'
end

-- Grant the free key to the first claim in the queue.
local function move_on()
  local owner = first()
  if not owner or is_young() then return end
  local claim = cjson.decode(redis.call('HGET', claims, owner))
  -- A claim that does not take over has to ask, and gets the reason.
  if is_stale() and not claim.takeover then return end
  write(owner, claim.holder, claim.ip, claim.handover_ttl)
  redis.call('SET', lock, owner, 'PX', claim.handover_ttl + grace)
  stand_down(owner)
  if claim.channel ~= '' then redis.call('PUBLISH', claim.channel, '') end
end
"""


@dataclass(frozen=True, slots=True)
class Script:
    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", hashlib.sha1(self.text.encode()).hexdigest())  # noqa: S324 (Redis names scripts by it)


# ttl, holder, ip, takeover, fair → token and whether it is a takeover; 'stale' or
# 'young'; nothing if the key is held.
ACQUIRE = Script(
    _COMMON
    + """
local ttl, holder, ip = tonumber(ARGV[4]), ARGV[5], ARGV[6]
local takeover, fair = ARGV[7] == '1', ARGV[8] == '1'
local current = redis.call('GET', lock)
if current == me then
  redis.call('PEXPIRE', lock, ttl + grace)
  redis.call('HSET', last, 'ends', text(now + ttl * 1000))
  return {redis.call('HGET', last, 'token'), 0}
end
if current or redis.call('ZSCORE', gone, me) then return false end
if is_young() then return 'young' end
local stale = is_stale()
if stale and not takeover then return 'stale' end
if fair then
  local before = first()
  if before and before ~= me then
    move_on()
    return false
  end
end
if not redis.call('SET', lock, me, 'NX', 'PX', ttl + grace) then return false end
stand_down(me)
return {write(me, holder, ip, ttl), stale and 1 or 0}
"""
)

# ttl → 1 if the claim is still held.
RENEW = Script(
    _COMMON
    + """
if not holds(me) then return 0 end
redis.call('PEXPIRE', lock, ARGV[4] + grace)
redis.call('HSET', last, 'ends', text(now + ARGV[4] * 1000))
return 1
"""
)

# count → 1 if the claim is still held.
VERIFY = Script(
    _COMMON
    + """
if not holds(me) then return 0 end
redis.call('HSET', last, 'count', ARGV[4])
return 1
"""
)

# status, keep → 1 if the claim held the key.
RELEASE = Script(
    _COMMON
    + """
stand_down(me)
local current = redis.call('GET', lock)
-- The lease has expired, but no other caller has taken the key over.
local late = not current and is_stale() and redis.call('HGET', last, 'owner') == me
if current ~= me and not late then
  redis.call('ZREMRANGEBYSCORE', gone, '-inf', text(now - """
    + str(GONE_FOR * 1_000_000)
    + """))
  redis.call('ZADD', gone, text(now), me)
  redis.call('EXPIRE', gone, """
    + str(GONE_FOR)
    + """)
  return 0
end
redis.call('HSET', last, 'status', ARGV[4], 'count', 0)
redis.call('EXPIRE', last, """
    + str(REMEMBERED_FOR)
    + """)
local keep = tonumber(ARGV[5])
if keep > 0 then
  redis.call('SET', lock, '', 'PX', keep)
  redis.call('HSET', last, 'ends', text(now + keep * 1000))
else
  redis.call('DEL', lock)
  move_on()
end
return 1
"""
)

# successor, ttl, holder, ip → the new token, or nothing if the claim no longer holds
# the key.
EXCHANGE = Script(
    _COMMON
    + """
local successor, ttl = ARGV[4], tonumber(ARGV[5])
if not (holds(me) or holds(successor)) then return false end
if redis.call('ZSCORE', gone, successor) then return false end
redis.call('SET', lock, successor, 'PX', ttl + grace)
return write(successor, ARGV[6], ARGV[7], ttl)
"""
)

# claim as JSON, position or nothing → 'ask', or the position.
QUEUE = Script(
    _COMMON
    + """
local current = redis.call('GET', lock)
if current == me then return 'ask' end
-- The request is late: the claim is cancelled already.
if redis.call('ZSCORE', gone, me) then return 'ask' end
local number = redis.call('ZSCORE', line, me)
if not number then
  if not current and not first() then return 'ask' end
  number = tonumber(ARGV[5])
  if not number then
    local behind = redis.call('ZRANGE', line, -1, -1, 'WITHSCORES')[2]
    number = math.max(now, (tonumber(behind) or 0) + 1)
  end
  redis.call('ZADD', line, text(number), me)
  redis.call('HSET', claims, me, ARGV[4])
end
heard(me)
if not current then move_on() end
return text(tonumber(number))
"""
)

# whether this is a heartbeat → 'granted', token, milliseconds left; 'place', number of
# claims ahead, position, milliseconds until something may change, whether to retry;
# nothing if the claim is not queued.
LOOK = Script(
    _COMMON
    + """
local function granted()
  if not holds(me) then return nil end
  return {
        'granted', redis.call('HGET', last, 'token'), redis.call('PTTL', lock) - grace
    }
end
local mine = granted()
if mine then return mine end
local number = redis.call('ZSCORE', line, me)
if not number then return false end
if ARGV[4] == '1' then heard(me) end
local left = redis.call('PTTL', lock)
local ask = 0
if left < 0 then
  move_on()
  mine = granted()
  if mine then return mine end
  if is_stale() and redis.call('EXISTS', lock) == 0 then ask = 1 end
end
return {
    'place', redis.call('ZRANK', line, me), text(tonumber(number)), left, ask
}
"""
)

# → the number of queued claims with a live heartbeat.
WAITING = Script(
    _COMMON
    + """
local waiting = 0
for _, owner in ipairs(redis.call('ZRANGE', line, 0, -1)) do
  local heard = tonumber(redis.call('HGET', claims, 'heard:' .. owner)) or 0
    if heard > now then waiting = waiting + 1 end
end
return waiting
"""
)

# → holder, ip, since, token, count, microseconds left, status; nothing if the key is
# free.
HOLDER = Script(
    _COMMON
    + """
local row = redis.call(
    'HMGET', last, 'holder', 'ip', 'since', 'token', 'count', 'ends', 'status'
)
local taken = redis.call('EXISTS', lock) == 1
if not row[7] then
  if not taken then return false end
  -- The holder is unknown: its data are lost, or another program uses this name.
  return {'', '', '0', '0', 0, redis.call('PTTL', lock) * 1000, 'P'}
end
if row[7] ~= 'P' and not taken then return false end
row[6] = text(tonumber(row[6]) - now)
return row
"""
)
