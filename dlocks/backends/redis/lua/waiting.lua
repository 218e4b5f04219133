-- Returns the number of queued claims with a live heartbeat.
local waiting = 0
for _, owner in ipairs(redis.call('ZRANGE', line, 0, -1)) do
  local heard = tonumber(redis.call('HGET', claims, 'heard:' .. owner)) or 0
  if heard > now then waiting = waiting + 1 end
end
return waiting
