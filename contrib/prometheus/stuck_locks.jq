# The numbers of stale locks and of waiters, as metrics of the node exporter's textfile
# collector. An alias whose locks cannot be counted has none, so its alerts end too. The
# collector must not read half a file, so it is renamed when it is complete.
#
#   python manage.py dlocks_health --json | jq -rf stuck_locks.jq > dlocks.tmp
#   mv dlocks.tmp dlocks.prom
to_entries[]
| select(.value.waiting)
| "dlocks_stale{dlocks_alias=\"\(.key)\"} \(.value.stale)",
  "dlocks_waiting{dlocks_alias=\"\(.key)\"} \(.value.waiting)"
