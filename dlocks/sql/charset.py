"""Texts that a connection can send, and its database can store."""

from __future__ import annotations

import codecs
import re
from typing import Any


def fitted(text: str, connection: Any) -> str:
    """Return a text with the characters escaped that the connection cannot send."""
    raw = connection.connection
    if connection.vendor == "postgresql":
        # The server sends the encoding of the database when a session begins. SQL_ASCII
        # stores the bytes as they are, and the session sends UTF-8.
        encoding = raw.info.parameter_status("server_encoding") or "UTF8"
        if encoding in {"UTF8", "SQL_ASCII"}:
            return text
        return escape_unencodable(text, encoding)
    if connection.vendor == "mysql":
        # The columns are in utf8mb4, but the session has a character set of its own.
        charset = raw.character_set_name()
        if charset in {"utf8", "utf8mb3"}:
            return "".join(
                one if ord(one) <= 0xFFFF else escape_unencodable(one, "ascii")
                for one in text
            )
        return text if charset == "utf8mb4" else escape_unencodable(text, charset)
    return escape_unencodable(text, "utf-8")


def escape_unencodable(text: str, charset: str) -> str:
    """Return a text in which characters outside a character set are escaped."""
    # For some encodings, Python has other names than PostgreSQL.
    name = re.sub("(?i)^win(?=[0-9])", "cp", charset)
    name = re.sub("(?i)^koi8(?=[ru]$)", "koi8-", name)
    try:
        codec = codecs.lookup(name).name
    except LookupError:
        codec = "ascii"
    return text.encode(codec, "backslashreplace").decode(codec)
