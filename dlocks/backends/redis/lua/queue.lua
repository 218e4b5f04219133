-- claim as JSON, position or nothing: returns 'ask', or the position.
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
note_heartbeat(me)
if not current then hand_over() end
return text(tonumber(number))
