-- The beginning of all scripts. Times are in microseconds. The durations in
-- arguments and in claims are in milliseconds, except settle, which is in seconds.
local lock, last, line, claims, gone = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local grace, settle, me = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local call = ARGV[#ARGV]
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

-- Let no delayed request of this claim have an effect.
local function forget(owner)
  redis.call('ZREMRANGEBYSCORE', gone, '-inf', text(now - GONE_FOR * 1000000))
  redis.call('ZADD', gone, text(now), owner)
  redis.call('EXPIRE', gone, GONE_FOR)
end

local function note_heartbeat(owner)
  redis.call('HSET', claims, 'heard:' .. owner, text(now + HEARTBEAT_TIMEOUT))
  redis.call('PEXPIRE', claims, 60000)
  redis.call('PEXPIRE', line, 60000)
end

local function leave_queue(owner)
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
    if until_then + DELETE_AFTER < now then
      leave_queue(owner)
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
local function hand_over()
  local owner = first()
  if not owner or is_young() then return end
  local claim = cjson.decode(redis.call('HGET', claims, owner))
  -- A claim that does not take over has to ask, and gets the reason.
  if is_stale() and not claim.takeover then return end
  write(owner, claim.holder, claim.ip, claim.handover_ttl)
  redis.call('SET', lock, owner, 'PX', claim.handover_ttl + grace)
  leave_queue(owner)
  if claim.channel ~= '' then redis.call('PUBLISH', claim.channel, '') end
end
