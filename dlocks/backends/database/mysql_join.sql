-- Queue a claim for a held key. NULL is returned if its row is locked.
--
-- A short transaction, sent as one packet. A client that is stopped in the middle of it
-- cannot keep the key. No statement fails at a locked row, since only the client could
-- roll back.
START TRANSACTION;

SELECT COUNT(*) INTO @dlocks_done
FROM {locks} FORCE INDEX (PRIMARY)
WHERE key_resource >= %(key)s AND key_resource <= %(key)s
  AND owner <> %(owner)s AND end_time > {now}
FOR UPDATE SKIP LOCKED;

INSERT IGNORE INTO {claims} ({columns})
SELECT {values} FROM DUAL WHERE @dlocks_done = 1;

-- It is in a variable, since a log of statements contains the value of a variable.
SET @dlocks_count = ROW_COUNT();

UPDATE {locks} SET waiters = waiters + @dlocks_count
WHERE key_resource = %(key)s AND @dlocks_done = 1;

COMMIT;

SELECT mine.id
FROM (
  SELECT 1 AS busy FROM {locks}
  WHERE key_resource = %(key)s AND owner <> %(owner)s AND end_time > {now}
) AS head
LEFT JOIN {claims} AS mine ON mine.owner = %(owner)s
