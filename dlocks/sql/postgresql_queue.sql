-- Join the queue of a held key, and count the claim. See Dialect.queue.
--
-- It waits a moment for the lock row, since other sessions lock it only to count claims.
WITH bound AS MATERIALIZED (
  SELECT
    set_config('lock_timeout', '5ms', true),
    set_config('synchronous_commit', 'off', true)
),
head AS MATERIALIZED (
  SELECT key_resource, CASE WHEN {free_by_clock} THEN 1 ELSE 0 END AS free
  FROM bound, {locks}
  WHERE key_resource = %(key)s AND (owner <> %(owner)s OR {free_by_clock})
  FOR UPDATE OF {of_locks}
),
mine AS (
  INSERT INTO {claims} ({columns}) SELECT {values} FROM head WHERE free = 0
  ON CONFLICT DO NOTHING RETURNING id
),
counted AS (
  UPDATE {locks} SET waiters = waiters + (SELECT COUNT(*) FROM mine)
  FROM head
  WHERE {locks}.key_resource = head.key_resource AND EXISTS (SELECT 1 FROM mine)
)
SELECT id, 0 FROM mine
