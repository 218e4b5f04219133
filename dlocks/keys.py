"""Keys of which users supply a part."""

from __future__ import annotations

import hashlib
from urllib.parse import quote
from uuid import UUID

# Characters of such a key: they leave room for the prefix of an alias.
LENGTH = 200
# Of its namespace, which is never cut off.
NAMESPACE_LENGTH = 100
# Bytes of one part.
PART_LENGTH = 1024


def user_key(namespace: str, *parts: str | int | UUID) -> str:
    """
    Return a key for a part of the application and for what its users supply: ``user_key("export", user.pk, name)``.

    No two different tuples of parts have the same key, whatever is in them: each is percent-encoded, and they are
    joined by colons. Numbers and UUIDs are as they are written, so that 7 from a row and "7" from an address are the
    same part. A key of more than 200 characters ends in the SHA-256 digest of all of it instead.

    ``namespace`` is an identifier, of ASCII letters, that the program chooses, never a user. A part is at most 1 KiB
    of UTF-8.
    """
    if not isinstance(namespace, str):
        raise TypeError(f"namespace must be a string, not {type(namespace).__name__}")
    if not (namespace.isascii() and namespace.isidentifier() and len(namespace) <= NAMESPACE_LENGTH):
        raise ValueError(
            f"namespace must be an identifier of at most {NAMESPACE_LENGTH} ASCII characters, not {namespace[:40]!r}: "
            "what users supply goes into the parts."
        )
    if not parts:
        raise TypeError("user_key() takes at least one part after the namespace")
    whole = ":".join([namespace, *(_quoted(number, part) for number, part in enumerate(parts, 1))])
    if len(whole) <= LENGTH:
        return whole
    # A "#" is in no key that is whole: no such key is the cut one of others.
    digest = hashlib.sha256(whole.encode()).hexdigest()
    return f"{whole[: LENGTH - 1 - len(digest)]}#{digest}"


def _quoted(number: int, part: str | int | UUID) -> str:
    if isinstance(part, bool) or not isinstance(part, str | int | UUID):
        # Who is not logged in has None for a pk; all of them would share one key.
        raise TypeError(f"part {number} of a key must be a str, int or UUID, not {type(part).__name__}")
    # A number so large is too long in any case, and Python may refuse to write it.
    if not isinstance(part, int) or part.bit_length() <= 4 * PART_LENGTH:
        text = str(int(part)) if isinstance(part, int) else part if isinstance(part, str) else str(part)
        if len(text) <= PART_LENGTH:
            try:
                raw = text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"part {number} of a key must be encodable as UTF-8: {error}") from error
            if len(raw) <= PART_LENGTH:
                return quote(raw, safe="")
    raise ValueError(f"part {number} of a key has at most {PART_LENGTH} bytes")
