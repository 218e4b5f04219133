-- Returns holder, ip, since, token, count, microseconds left, status; nothing if the
-- key is free.
local row = redis.call(
  'HMGET', last, 'holder', 'ip', 'since', 'token', 'count', 'ends', 'status'
)
local taken = redis.call('EXISTS', lock) == 1
if not row[7] then
  if not taken then return false end
  -- The holder is unknown: its data are lost, or another program uses this name.
  return {'', '', '0', '0', 0, redis.call('PTTL', lock) * 1000, 'P'}
end
if row[7] ~= 'P' and not taken then return false end
row[6] = text(tonumber(row[6]) - now)
return row
