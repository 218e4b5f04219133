-- ttl, holder, ip, takeover, fair: returns token and whether it is a takeover;
-- 'stale' or 'young'; nothing if the key is held.
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
    hand_over()
    return false
  end
end
if not redis.call('SET', lock, me, 'NX', 'PX', ttl + grace) then return false end
leave_queue(me)
return {write(me, holder, ip, ttl), stale and 1 or 0}
