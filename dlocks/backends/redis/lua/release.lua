-- status, keep: returns 1 if the claim held the key.
-- This call has released it before, and the reply was lost.
if redis.call('ZSCORE', gone, call) then return 1 end
leave_queue(me)
local current = redis.call('GET', lock)
-- The lease has expired, but no other caller has taken the key over.
local late = not current and is_stale() and redis.call('HGET', last, 'owner') == me
forget(me)
if current ~= me and not late then return 0 end
redis.call('ZADD', gone, text(now), call)
redis.call('HSET', last, 'status', ARGV[4], 'count', 0)
redis.call('EXPIRE', last, REMEMBERED_FOR)
local keep = tonumber(ARGV[5])
if keep > 0 then
  redis.call('SET', lock, '', 'PX', keep)
  redis.call('HSET', last, 'ends', text(now + keep * 1000))
else
  redis.call('DEL', lock)
  hand_over()
end
return 1
