-- Queue a claim for a held key. Nothing is returned if the key is free, or reserved.
INSERT INTO {claims} ({columns})
SELECT {values} FROM {locks}
WHERE key_resource = %(key)s AND owner <> %(owner)s AND end_time > {now}
ON CONFLICT DO NOTHING;

UPDATE {locks} SET waiters = waiters + 1
WHERE key_resource = %(key)s AND changes() > 0;

SELECT mine.id
FROM {claims} AS mine JOIN {locks} AS head ON head.key_resource = mine.key_resource
WHERE mine.owner = %(owner)s AND mine.version IS NULL
  AND head.owner <> %(owner)s AND head.end_time > {now}
