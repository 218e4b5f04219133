-- count: returns 1 if the claim is still held.
if not holds(me) then return 0 end
redis.call('HSET', last, 'count', ARGV[4])
return 1
