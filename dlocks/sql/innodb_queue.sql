-- Join the queue of a held key, and count the claim. See Dialect.queue.
--
-- A short transaction, sent as one packet. A client that is stopped in the middle of it
-- cannot keep the key. An UPDATE of joined tables would use a temporary table, at five
-- times the cost.
START TRANSACTION;

SELECT COUNT(*) INTO @dlocks_done
FROM {locks} FORCE INDEX (PRIMARY)
WHERE key_resource >= %(key)s AND key_resource <= %(key)s
  AND NOT {free_by_clock} AND owner <> %(owner)s
FOR UPDATE SKIP LOCKED;

INSERT IGNORE INTO {claims} ({columns})
SELECT {values} FROM DUAL WHERE @dlocks_done = 1;

-- It is in a variable, since a log of statements contains the value of a variable.
SET @dlocks_count = ROW_COUNT();

UPDATE {locks} SET waiters = waiters + @dlocks_count
WHERE key_resource = %(key)s AND @dlocks_done = 1;

COMMIT;

-- No row is returned if the turn of the claim has come in the meantime.
SELECT mine.id, head.free
FROM (
  SELECT owner, CASE WHEN {free_by_clock} THEN 1 ELSE 0 END AS free
  FROM {locks} WHERE key_resource = %(key)s
) AS head
LEFT JOIN {claims} AS mine ON mine.owner = %(owner)s
WHERE mine.id IS NOT NULL OR head.owner <> %(owner)s
