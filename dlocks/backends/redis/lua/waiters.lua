-- Returns the queued claims with a live heartbeat: for each the claim as JSON, and the
-- microseconds since it joined the queue.
local waiters = {}
for _, owner in ipairs(redis.call('ZRANGE', line, 0, -1)) do
  local heard = tonumber(redis.call('HGET', claims, 'heard:' .. owner)) or 0
  if heard > now then
    waiters[#waiters + 1] = redis.call('HGET', claims, owner)
    waiters[#waiters + 1] = text(now - tonumber(redis.call('ZSCORE', line, owner)))
  end
end
return waiters
