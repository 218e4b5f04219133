-- successor, ttl, holder, ip: returns the new token, or nothing if the claim no
-- longer holds the key.
local successor, ttl = ARGV[4], tonumber(ARGV[5])
if not (holds(me) or holds(successor)) then return false end
if redis.call('ZSCORE', gone, successor) then return false end
forget(me)
redis.call('SET', lock, successor, 'PX', ttl + grace)
return write(successor, ARGV[6], ARGV[7], ttl)
