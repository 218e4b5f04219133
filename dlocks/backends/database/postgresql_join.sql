-- Queue a claim for a held key. Nothing is returned if the key is free, or reserved.
WITH bound AS MATERIALIZED (
  SELECT
    set_config('lock_timeout', '50ms', true),
    set_config('synchronous_commit', 'off', true)
),
head AS MATERIALIZED (
  SELECT key_resource FROM bound, {locks}
  WHERE key_resource = %(key)s AND owner <> %(owner)s AND end_time > {now}
  FOR UPDATE OF {of_locks}
),
mine AS (
  INSERT INTO {claims} ({columns}) SELECT {values} FROM head
  ON CONFLICT DO NOTHING RETURNING id
),
counting AS (
  UPDATE {locks} SET waiters = waiters + 1 FROM head
  WHERE {locks}.key_resource = head.key_resource AND EXISTS (SELECT 1 FROM mine)
)
SELECT id FROM mine
