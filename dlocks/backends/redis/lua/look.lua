-- whether this is a heartbeat: returns 'granted', token, milliseconds left; 'place',
-- number of claims ahead, position, milliseconds until something may change, whether
-- to retry; nothing if the claim is not queued.
local function granted()
  if not holds(me) then return nil end
  return {'granted', redis.call('HGET', last, 'token'), redis.call('PTTL', lock) - grace}
end
local mine = granted()
if mine then return mine end
local number = redis.call('ZSCORE', line, me)
if not number then return false end
if ARGV[4] == '1' then note_heartbeat(me) end
local left = redis.call('PTTL', lock)
local ask = 0
-- A key without a time to live (-1) is another program's, and is not free.
if left == -2 then
  hand_over()
  mine = granted()
  if mine then return mine end
  if is_stale() and redis.call('EXISTS', lock) == 0 then ask = 1 end
end
return {'place', redis.call('ZRANK', line, me), text(tonumber(number)), left, ask}
