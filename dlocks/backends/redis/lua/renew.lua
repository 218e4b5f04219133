-- ttl: returns 1 if the claim is still held.
if not holds(me) then return 0 end
redis.call('PEXPIRE', lock, ARGV[4] + grace)
redis.call('HSET', last, 'ends', text(now + ARGV[4] * 1000))
return 1
