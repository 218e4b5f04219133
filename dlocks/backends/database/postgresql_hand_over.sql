-- Release a key, and grant it to the first waiter if that wants it alone.
WITH bound AS MATERIALIZED (SELECT set_config('lock_timeout', '200ms', true)),
head AS MATERIALIZED (
  SELECT key_resource FROM bound, {locks}
  WHERE key_resource = %(key)s AND owner = %(owner)s AND status = 'P' AND shares = 0
  FOR UPDATE OF {of_locks}
),
first AS MATERIALIZED (
  SELECT id, shared FROM {claims}
  WHERE key_resource = (SELECT key_resource FROM head)
    AND version IS NULL AND end_time > {now}
  ORDER BY id LIMIT 1
),
-- Whether others wait, counted in the row or not.
others AS MATERIALIZED (
  SELECT id FROM {claims}
  WHERE key_resource = (SELECT key_resource FROM head)
    AND version IS NULL AND end_time > {now}
    AND id > (SELECT id FROM first)
  LIMIT 1
),
-- The statement may have waited for the lock row. The first waiter may have left the
-- queue since.
taken AS (
  DELETE FROM {claims}
  WHERE id = (SELECT id FROM first WHERE NOT shared)
    AND version IS NULL AND end_time > {now}
  RETURNING owner, holder, owner_ip, scope, handover_ttl, channel
)
UPDATE {locks} SET
  status = COALESCE(taken.scope, %(status)s),
  owner = COALESCE(taken.owner, {locks}.owner),
  holder = COALESCE(taken.holder, {locks}.holder),
  owner_ip = CASE WHEN taken.owner IS NULL THEN {locks}.owner_ip ELSE taken.owner_ip END,
  begin_time = CASE WHEN taken.owner IS NULL THEN begin_time ELSE {now} END,
  -- LEAST() ignores NULL.
  end_time = {now} + interval '1 microsecond'
    * CASE WHEN taken.owner IS NULL THEN 0 ELSE LEAST(taken.handover_ttl, %(lease)s) END,
  hold_count = CASE WHEN taken.owner IS NULL THEN 0 ELSE 1 END,
  version = CASE WHEN taken.owner IS NULL THEN version ELSE {token} END,
  waiters = GREATEST(
    waiters - CASE WHEN taken.owner IS NULL THEN 0 ELSE 1 END,
    (SELECT COUNT(*) FROM others)
  )
FROM head LEFT JOIN taken ON TRUE
WHERE {locks}.key_resource = head.key_resource
RETURNING
  taken.owner IS NOT NULL, waiters, channel,
  CASE WHEN channel <> '' AND NOT starts_with(channel, %(near)s)
       THEN pg_notify(channel, '') END,
  -- A release that a crash loses only lets the lease expire.
  CASE WHEN taken.owner IS NULL
       THEN set_config('synchronous_commit', 'off', true) END
