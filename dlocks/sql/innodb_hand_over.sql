-- Release a key, and grant it to the first waiter. See Dialect.hand_over.
--
-- No statement fails at a locked row, since only the client could roll back.
START TRANSACTION;

SELECT COUNT(*), MAX(waiters), MAX({next_version})
INTO @dlocks_done, @dlocks_waiters, @dlocks_version
FROM {locks} FORCE INDEX (PRIMARY)
WHERE key_resource >= %(key)s AND key_resource <= %(key)s
  AND {condition} AND shares = 0
FOR UPDATE SKIP LOCKED;

-- Aggregates are NULL if there is no waiter.
SELECT
  MAX(id), MAX(owner), MAX(holder), MAX(owner_ip), MAX(scope), MAX(channel),
  MAX(handover_ttl),
  IF(MAX(counted), GREATEST(@dlocks_waiters, 1) - 1, @dlocks_waiters)
INTO
  @dlocks_id, @dlocks_owner, @dlocks_holder, @dlocks_ip, @dlocks_scope,
  @dlocks_channel, @dlocks_handover_ttl, @dlocks_waiters
FROM {claims}
WHERE @dlocks_done = 1 AND NOT shared
  AND id = (
    SELECT MIN(first.id) FROM {claims} AS first
    WHERE first.key_resource = %(key)s AND first.version IS NULL
      AND first.end_time > {now}
  )
  AND version IS NULL AND end_time > {now}
FOR UPDATE SKIP LOCKED;

DELETE FROM {claims} WHERE id = @dlocks_id;

UPDATE {locks} SET
  status = COALESCE(@dlocks_scope, %(status)s),
  owner = COALESCE(@dlocks_owner, owner),
  holder = COALESCE(@dlocks_holder, holder),
  owner_ip = IF(@dlocks_id IS NULL, owner_ip, @dlocks_ip),
  begin_time = IF(@dlocks_id IS NULL, begin_time, {now}),
  end_time = {now} + INTERVAL COALESCE(@dlocks_handover_ttl, 0) MICROSECOND,
  hold_count = IF(@dlocks_id IS NULL, 0, 1),
  version = IF(@dlocks_id IS NULL, version, @dlocks_version),
  waiters = @dlocks_waiters
WHERE key_resource = %(key)s AND @dlocks_done = 1{if_taken};

COMMIT;

SELECT
  @dlocks_id IS NOT NULL, @dlocks_waiters, @dlocks_channel, @dlocks_owner,
  IF(@dlocks_scope = 'P', @dlocks_version, NULL), @dlocks_handover_ttl, {server}
FROM DUAL WHERE @dlocks_done = 1{if_taken}
