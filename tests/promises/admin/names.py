"""The addresses and actions of the admin, and keys that are hard to show."""

LIST = "/admin/dlocks/resourcelock/"
END = f"{LIST}end/"
RECORDS = "/admin/dlocks/holdrecord/"
CLEAR, FORCE = "clear_stale_locks", "force_release"
HOSTILE = "<img src=x onerror=alert(1)>\"'><script>alert(2)</script>"
ODD_KEYS = [
    "<script>alert(1)</script>", "'; DROP TABLE dlocks_resourcelock; --",
    "tenant/42/import", "a\nb", "a\r\nb", "a\rb",
    "emoji 🔒", "100%41", "a b ", "../..", "_0A", "add", '"quoted" & more',
    "\u202egnp.exe", "x" * 255,
]  # fmt: skip
