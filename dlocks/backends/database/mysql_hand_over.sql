-- Release a key, and grant it to the first waiter if that wants it alone. NULL is
-- returned if its row is locked.
START TRANSACTION;

SELECT COUNT(*), MAX({token}) INTO @dlocks_done, @dlocks_version
FROM {locks} FORCE INDEX (PRIMARY)
WHERE key_resource >= %(key)s AND key_resource <= %(key)s
  AND owner = %(owner)s AND status = 'P' AND shares = 0
FOR UPDATE SKIP LOCKED;

-- All that wait, counted in the row or not. A subquery of SET would wait for a claim
-- that another transaction has locked.
SELECT COUNT(*), MIN(id) INTO @dlocks_waiters, @dlocks_first
FROM {claims}
WHERE @dlocks_done = 1 AND key_resource = %(key)s AND version IS NULL
  AND end_time > {now};

-- Aggregates are NULL if there is no waiter.
SELECT
  MAX(id), MAX(owner), MAX(holder), MAX(owner_ip), MAX(scope), MAX(channel),
  LEAST(MAX(handover_ttl), %(lease)s), @dlocks_waiters - COUNT(*)
INTO
  @dlocks_id, @dlocks_owner, @dlocks_holder, @dlocks_ip, @dlocks_scope,
  @dlocks_channel, @dlocks_ttl, @dlocks_waiters
FROM {claims}
WHERE id = @dlocks_first AND NOT shared AND version IS NULL AND end_time > {now}
FOR UPDATE SKIP LOCKED;

DELETE FROM {claims} WHERE id = @dlocks_id;

UPDATE {locks} SET
  status = COALESCE(@dlocks_scope, %(status)s),
  owner = COALESCE(@dlocks_owner, owner),
  holder = COALESCE(@dlocks_holder, holder),
  owner_ip = IF(@dlocks_id IS NULL, owner_ip, @dlocks_ip),
  begin_time = IF(@dlocks_id IS NULL, begin_time, {now}),
  end_time = {now} + INTERVAL COALESCE(@dlocks_ttl, 0) MICROSECOND,
  hold_count = IF(@dlocks_id IS NULL, 0, 1),
  version = IF(@dlocks_id IS NULL, version, @dlocks_version),
  waiters = @dlocks_waiters
WHERE key_resource = %(key)s AND @dlocks_done = 1;

COMMIT;

SELECT
  IF(@dlocks_done = 1, @dlocks_id IS NOT NULL, NULL), @dlocks_waiters, @dlocks_channel
FROM DUAL
WHERE @dlocks_done = 1 OR EXISTS (
  SELECT 1 FROM {locks}
  WHERE key_resource = %(key)s AND owner = %(owner)s AND status = 'P' AND shares = 0
)
