"""
What runs inside of Redis: each step on a key is one script, since between two commands anything may happen.

A key is five names in Redis, all of one slot:

* the lock: the owner, with a time to live of the ttl and the grace. Taken by ``SET … NX PX``;
* ``:last``: what is known of the last grant. It outlives the lock, for its token and for who never came back;
* ``:line``: the owners of the claims in line, by number;
* ``:claims``: for each of those what the line has to know to grant it the key, and until when it counts as heard of;
* ``:gone``: the claims that were given up before they had the key, and when: a request of theirs that was held up on
  its way comes to nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from dlocks.backends.base import HEARD_FOR

# For so many seconds a key that was given back is remembered: its token grows from then on by the clock alone.
REMEMBERED_FOR = 86400
# What was given up is remembered for so many seconds: longer than a request is on its way.
GONE_FOR = 60
# Claims in line that were not heard of for so many seconds are forgotten, not only passed over.
FORGOTTEN_AFTER = 10

_COMMON = f"""
local lock, last, line, claims, gone = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local grace, settle, me = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local function text(number)
  return string.format('%.0f', number)
end

-- Whether the lease stands: what comes after it is the grace.
local function holds(owner)
  return redis.call('GET', lock) == owner and redis.call('PTTL', lock) > grace
end

local function write(owner, holder, ip, ttl)
  local token = math.max(now, (tonumber(redis.call('HGET', last, 'token')) or 0) + 1)
  redis.call('HSET', last, 'token', text(token), 'status', 'P', 'owner', owner, 'holder', holder, 'ip', ip,
    'since', text(now), 'ends', text(now + ttl * 1000), 'count', 1)
  redis.call('PERSIST', last)
  return text(token)
end

local function heard(owner)
  redis.call('HSET', claims, 'heard:' .. owner, text(now + {round(HEARD_FOR * 1e6)}))
  redis.call('PEXPIRE', claims, 60000)
  redis.call('PEXPIRE', line, 60000)
end

local function stand_down(owner)
  redis.call('HDEL', claims, owner, 'heard:' .. owner)
  return redis.call('ZREM', line, owner) == 1
end

-- The first in line that was heard of. Those who were silent for long are forgotten.
local function first()
  local place = 0
  while true do
    local owner = redis.call('ZRANGE', line, place, place)[1]
    if not owner then return nil end
    local until_then = tonumber(redis.call('HGET', claims, 'heard:' .. owner)) or 0
    if until_then > now then return owner end
    if until_then + {FORGOTTEN_AFTER * 1_000_000} < now then stand_down(owner) else place = place + 1 end
  end
end

-- Whether it was started so short a time ago that what it may have forgotten may still be held.
local function is_young()
  if settle == 0 then return false end
  return tonumber(string.match(redis.call('INFO', 'server'), 'uptime_in_seconds:(%d+)')) <= settle
end

local function is_stale()
  return redis.call('HGET', last, 'status') == 'P'
end

-- Grant the key, which is free, to the first in line.
local function move_on()
  local owner = first()
  if not owner or is_young() then return end
  local claim = cjson.decode(redis.call('HGET', claims, owner))
  -- One that does not take over has to be told so, and asks.
  if is_stale() and not claim.takeover then return end
  local token = write(owner, claim.holder, claim.ip, claim.patience)
  redis.call('SET', lock, owner, 'PX', claim.patience + grace)
  stand_down(owner)
  if claim.channel ~= '' then
    redis.call('PUBLISH', claim.channel, owner .. ' ' .. token .. ' ' .. text(now + claim.patience * 1000))
  end
end
"""


@dataclass(frozen=True, slots=True)
class Script:
    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", hashlib.sha1(self.text.encode()).hexdigest())  # noqa: S324 (Redis's own name)


# ttl, holder, ip, takeover, fair → token and whether it is a takeover; 'stale' or 'young'; nothing where it is busy.
ACQUIRE = Script(
    _COMMON
    + """
local ttl, holder, ip, takeover, fair = tonumber(ARGV[4]), ARGV[5], ARGV[6], ARGV[7] == '1', ARGV[8] == '1'
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

# ttl → 1 where it is still held.
RENEW = Script(
    _COMMON
    + """
if not holds(me) then return 0 end
redis.call('PEXPIRE', lock, ARGV[4] + grace)
redis.call('HSET', last, 'ends', text(now + ARGV[4] * 1000))
return 1
"""
)

# count → 1 where it is still held.
RECOUNT = Script(
    _COMMON
    + """
if not holds(me) then return 0 end
redis.call('HSET', last, 'count', ARGV[4])
return 1
"""
)

# status, keep → 1 where the claim had the key.
RELEASE = Script(
    _COMMON
    + """
stand_down(me)
local current = redis.call('GET', lock)
-- It ran out, but nobody has taken it over.
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

# successor, ttl, holder, ip → the new token, or nothing where the claim has the key no more.
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

# claim as JSON, number or nothing → 'ask', or the number and the clock.
QUEUE = Script(
    _COMMON
    + """
local current = redis.call('GET', lock)
if current == me then return {'ask'} end
-- It comes late, and was given up already.
if redis.call('ZSCORE', gone, me) then return {'ask'} end
local number = redis.call('ZSCORE', line, me)
if not number then
  if not current and not first() then return {'ask'} end
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
return {text(tonumber(number)), text(now)}
"""
)

# whether it is heard of → 'granted', token, milliseconds left; 'place', how many are ahead, number, milliseconds
# until something may change, clock, whether to ask; nothing where it has no place.
LOOK = Script(
    _COMMON
    + """
local function granted()
  if not holds(me) then return nil end
  return {'granted', redis.call('HGET', last, 'token'), redis.call('PTTL', lock) - grace}
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
return {'place', redis.call('ZRANK', line, me), text(tonumber(number)), left, text(now), ask}
"""
)

# → how many claims in line were heard of.
WAITING = Script(
    _COMMON
    + """
local waiting = 0
for _, owner in ipairs(redis.call('ZRANGE', line, 0, -1)) do
  if (tonumber(redis.call('HGET', claims, 'heard:' .. owner)) or 0) > now then waiting = waiting + 1 end
end
return waiting
"""
)

# → holder, ip, since, token, count, microseconds left, status; nothing where the key is free.
HOLDER = Script(
    _COMMON
    + """
local row = redis.call('HMGET', last, 'holder', 'ip', 'since', 'token', 'count', 'ends', 'status')
local taken = redis.call('EXISTS', lock) == 1
if not row[7] then
  if not taken then return false end
  -- Who had it was forgotten, or never written: somebody else's name in Redis.
  return {'', '', '0', '0', 0, redis.call('PTTL', lock) * 1000, 'P'}
end
if row[7] ~= 'P' and not taken then return false end
row[6] = text(tonumber(row[6]) - now)
return row
"""
)

# → 1 where nobody stands in the way any more.
MOVE_ON = Script(
    _COMMON
    + """
if redis.call('EXISTS', lock) == 0 then move_on() end
return 1
"""
)
