-- Release a key, and grant it to the first waiter. See Dialect.hand_over.
WITH bound AS MATERIALIZED (
  SELECT set_config('lock_timeout', '{row_wait}', true)
),
head AS MATERIALIZED (
  SELECT key_resource FROM bound, {locks}
  WHERE key_resource = %(key)s AND {condition} AND shares = 0
  FOR UPDATE OF {of_locks}
),
first AS MATERIALIZED (
  SELECT id, shared FROM {claims}
  WHERE key_resource = (SELECT key_resource FROM head)
    AND version IS NULL AND end_time > {now}
  ORDER BY id LIMIT 1
),
-- The statement may have waited for the lock row. The first waiter may have left the
-- queue since.
taken AS (
  DELETE FROM {claims}
  WHERE id = (SELECT id FROM first WHERE NOT shared)
    AND version IS NULL AND end_time > {now}
  RETURNING owner, holder, owner_ip, scope, counted, handover_ttl, channel
)
UPDATE {locks} SET
  status = COALESCE(taken.scope, %(status)s),
  owner = COALESCE(taken.owner, {locks}.owner),
  holder = COALESCE(taken.holder, {locks}.holder),
  owner_ip = CASE WHEN taken.owner IS NULL THEN {locks}.owner_ip ELSE taken.owner_ip END,
  begin_time = CASE WHEN taken.owner IS NULL THEN begin_time ELSE {now} END,
  end_time = {now} + COALESCE(taken.handover_ttl, 0) * interval '1 microsecond',
  hold_count = CASE WHEN taken.owner IS NULL THEN 0 ELSE 1 END,
  version = CASE WHEN taken.owner IS NULL THEN version ELSE {next_version} END,
  waiters = GREATEST(waiters - CASE WHEN taken.counted THEN 1 ELSE 0 END, 0)
FROM head LEFT JOIN taken ON TRUE
WHERE {locks}.key_resource = head.key_resource{if_taken}
RETURNING
  taken.owner IS NOT NULL, waiters,
  CASE WHEN left(channel, 9) = %(near)s THEN channel END, taken.owner,
  CASE WHEN taken.scope = 'P' THEN version END, taken.handover_ttl, '',
  CASE WHEN channel <> '' AND left(channel, 9) <> %(near)s
       THEN pg_notify(channel, '') END
