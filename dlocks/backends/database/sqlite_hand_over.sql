-- Release a key, and grant it to the first waiter if that wants it alone.
UPDATE {locks} SET
  status = COALESCE(first.scope, %(status)s),
  owner = COALESCE(first.owner, {locks}.owner),
  holder = COALESCE(first.holder, {locks}.holder),
  owner_ip = CASE WHEN first.id IS NULL THEN {locks}.owner_ip ELSE first.owner_ip END,
  begin_time = CASE WHEN first.id IS NULL THEN {locks}.begin_time ELSE {now} END,
  end_time = {after_lease},
  hold_count = first.id IS NOT NULL,
  version = CASE WHEN first.id IS NULL THEN {locks}.version
    ELSE MAX({locks}.version + 1, {ticks}) END,
  waiters = others.number - (first.id IS NOT NULL)
FROM (
  SELECT COUNT(*) AS number, MIN(id) AS id FROM {claims}
  WHERE key_resource = %(key)s AND version IS NULL AND end_time > {now}
) AS others
LEFT JOIN {claims} AS first ON first.id = others.id AND NOT first.shared
WHERE {locks}.key_resource = %(key)s AND {locks}.owner = %(owner)s
  AND {locks}.status = 'P' AND {locks}.shares = 0
RETURNING owner <> %(owner)s, waiters, (
  SELECT channel FROM {claims} AS told
  WHERE told.owner = {locks}.owner AND told.version IS NULL
);

DELETE FROM {claims}
WHERE version IS NULL AND key_resource = %(key)s
  AND owner = (SELECT owner FROM {locks} WHERE key_resource = %(key)s)
