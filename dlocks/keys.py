"""Keys built from user input, and those of leaders."""

from __future__ import annotations

import hashlib
from urllib.parse import quote
from uuid import UUID

# Maximum characters of such a key. The rest is left for the prefix of an alias.
LENGTH = 200
# Maximum characters of the namespace, which is never truncated.
NAMESPACE_LENGTH = 100
# Maximum bytes of one part.
PART_LENGTH = 1024
# The start of the key of an election, whose leader holds it for as long as it lives.
LEADER_PREFIX = "leader:"


def user_key(namespace: str, *parts: str | int | UUID) -> str:
    """Return a key built from a namespace and from user input.

        user_key("export", user.pk, name)

    Different tuples of parts never give the same key. Each part is percent-encoded, and
    the parts are joined by colons. Numbers and UUIDs are used in their text form, so 7
    from a row and "7" from a URL are the same part. A key of more than 200 characters
    is truncated and ends in the SHA-256 digest of the whole key.

    ``namespace`` is an ASCII identifier. The program chooses it, never a user. A part
    has at most 1 KiB of UTF-8.
    """
    if not isinstance(namespace, str):
        raise TypeError(f"namespace must be a string, not {type(namespace).__name__}")
    if not (
        namespace.isascii()
        and namespace.isidentifier()
        and len(namespace) <= NAMESPACE_LENGTH
    ):
        raise ValueError(
            f"namespace must be an identifier of at most {NAMESPACE_LENGTH} ASCII"
            f" characters, not {namespace[:40]!r}: what users supply goes into the"
            " parts."
        )
    if not parts:
        raise TypeError("user_key() takes at least one part after the namespace")
    whole = ":".join(
        [namespace, *(_quoted(number, part) for number, part in enumerate(parts, 1))]
    )
    if len(whole) <= LENGTH:
        return whole
    # An untruncated key never contains "#", so it cannot equal a truncated one.
    digest = hashlib.sha256(whole.encode()).hexdigest()
    return f"{whole[: LENGTH - 1 - len(digest)]}#{digest}"


def _quoted(number: int, part: str | int | UUID) -> str:
    if isinstance(part, bool) or not isinstance(part, str | int | UUID):
        # The pk of an anonymous user is None. All anonymous users would share one key.
        raise TypeError(
            f"part {number} of a key must be a str, int or UUID, not"
            f" {type(part).__name__}"
        )
    too_long = ValueError(f"part {number} of a key has at most {PART_LENGTH} bytes")
    if isinstance(part, int):
        # An integer this large is too long in any case, and Python may refuse to
        # convert it to a string.
        if part.bit_length() > 4 * PART_LENGTH:
            raise too_long
        part = int(part)
    text = part if isinstance(part, str) else str(part)
    if len(text) > PART_LENGTH:
        raise too_long
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"part {number} of a key must be encodable as UTF-8: {error}"
        ) from error
    if len(raw) > PART_LENGTH:
        raise too_long
    return quote(raw, safe="")
