"""Whatever comes in: it works, or is refused by its name before any query; and no key is ever another one."""

from __future__ import annotations

import dataclasses
import io
import unicodedata
from contextlib import suppress

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import connections
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from dlocks import db_lock, db_rwlock, db_semaphore, user_key
from dlocks.backends.base import KEY_LENGTH, BaseBackend, Claim
from dlocks.backends.database import PessimisticBackend
from dlocks.conf import DEFAULT_ALIAS, BackendHandler, backends, options_of
from dlocks.locks import Lock
from dlocks.multi import MultiLock

FUZZ = settings(
    max_examples=200,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
REFUSED = (ValueError, TypeError)

# Surrogates and NUL, too; and what databases, shells and eyes take for each other.
TEXT = st.text(st.characters() | st.sampled_from("\0\ud800%:'\"\\ \t\n\rAaäÄßıİK\u0301\u200b\u202e🔒"), max_size=300)
KEYS = st.text(st.sampled_from("aAäÄ\u0308ßıi %:\\'\"\t\n\r\x01🔒"), min_size=1, max_size=6)
ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([10**400, -1, 0, 1, 2**31, 1e308, object(), len, b"x"])
    | TEXT
    | st.binary(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.integers(), inner, max_size=3),
    max_leaves=4,
)
POLICY = [
    "using", "timeout", "ttl", "renew", "max_hold", "reentrant", "scope", "release_at", "at_least", "takeover", "fair",
    "on_lost", "permits", "shared",
]  # fmt: skip


@pytest.fixture
def no_queries(monkeypatch):
    """Nothing is asked of any database."""

    def refuse(*args, **kwargs):
        raise AssertionError("a query")

    for connection in connections.all():
        monkeypatch.setattr(connection, "cursor", refuse)
        monkeypatch.setattr(connection, "connect", refuse)


@pytest.mark.usefixtures("no_queries")
class TestRefusals:
    @FUZZ
    @given(key=TEXT | ANY, more=st.lists(TEXT | ANY, max_size=2))
    def test_keys(self, key, more):
        """Of locks on one and on several keys."""
        try:
            lock = db_lock(key, *more)
        except REFUSED:
            return
        if callable(key):
            return
        for one in lock.keys:
            assert 0 < len(one) <= KEY_LENGTH
            assert "\0" not in one
            assert one.encode()
        assert set(lock.keys) == {key, *more}

    @FUZZ
    @given(policy=st.dictionaries(st.sampled_from(POLICY), ANY, max_size=3), kind=st.integers(0, 3))
    def test_options_of_locks(self, policy, kind):
        """What is not refused at once by a TypeError or a ValueError works."""
        makers = [db_lock, db_rwlock, lambda key, **policy: db_semaphore(key, **{"permits": 3, **policy}), Lock]
        try:
            lock = makers[kind](**{"key": "fuzz", **policy})
            one = lock.read() if kind == 1 else lock
            assert isinstance(one, Lock | MultiLock)
            backends[one.using]
        except (*REFUSED, ImproperlyConfigured):
            return
        # What was not refused is asked for where that is no query: some backends cannot share.
        if isinstance(one, Lock):
            with suppress(*REFUSED, RuntimeError), dataclasses.replace(one, using="dummy"):
                pass

    @FUZZ
    @given(
        kind=st.sampled_from(["Pessimistic", "Optimistic", "Insert"]),
        options=st.dictionaries(
            st.sampled_from(sorted(options_of(PessimisticBackend))) | TEXT,
            ANY,
            max_size=3,
        ),
    )  # fmt: skip
    def test_options_of_backends(self, kind, options):
        """Refused as ImproperlyConfigured, with the alias and the option; never an error of another kind."""
        configured = {DEFAULT_ALIAS: {"BACKEND": f"dlocks.backends.database.{kind}Backend", "OPTIONS": options}}
        backend = made(configured)
        if backend is not None:
            assert options.keys() <= options_of(type(backend))
            assert backend.ttl > 0
            assert backend.grace >= 0
            assert isinstance(backend.database, str)
            backend.check()

    @FUZZ
    @given(configured=ANY | st.dictionaries(st.just(DEFAULT_ALIAS), ANY) | st.fixed_dictionaries(
        {DEFAULT_ALIAS: st.dictionaries(st.sampled_from(["BACKEND", "OPTIONS", "X"]), ANY)}
    ))  # fmt: skip
    @example({DEFAULT_ALIAS: {"BACKEND": 5}})
    @example({DEFAULT_ALIAS: {"BACKEND": "."}})
    @example({DEFAULT_ALIAS: {"BACKEND": "\0.x"}})
    @example({DEFAULT_ALIAS: {"BACKEND": "dlocks.backends.base.BaseBackend", "OPTIONS": 5}})
    def test_the_setting(self, configured):
        """Whatever DLOCKS is."""
        made(configured)


def made(configured) -> BaseBackend | None:
    """Return the default backend of a setting; None where it is refused."""
    handler = BackendHandler()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("django.conf.settings.DLOCKS", configured)
        try:
            return handler[DEFAULT_ALIAS]
        except ImproperlyConfigured as error:
            assert "DLOCKS" in str(error)
            return None


class TestUserKeys:
    @FUZZ
    @given(parts=st.lists(TEXT | st.integers() | st.uuids() | ANY, max_size=4), namespace=TEXT | ANY | st.just("n"))
    def test_they_are_keys_or_refused(self, namespace, parts):
        try:
            key = user_key(namespace, *parts)
        except REFUSED:
            return
        assert db_lock(key).key == key
        assert key.isascii()
        assert key.isprintable()
        assert len(key) <= 200

    @FUZZ
    @given(one=st.lists(KEYS | st.just(""), min_size=1, max_size=4), other=st.lists(KEYS, min_size=1, max_size=4))
    def test_two_of_them_are_the_same_only_for_the_same_parts(self, one, other):
        assert (user_key("n", *one) == user_key("n", *other)) == (one == other)
        joined = ":".join(one)
        assert (user_key("n", joined) == user_key("n", *one)) == ([joined] == one)
        # The long ones, too.
        assert (user_key("n", *one, "x" * 500) == user_key("n", *other, "x" * 500)) == (one == other)


def exclude(backend: BaseBackend, one: str, other: str) -> bool:
    """Tell whether nobody can have the one key while somebody has the other."""
    mine, theirs = (Claim(key=key, ttl=30) for key in (one, other))
    assert backend.acquire(mine) is not None
    try:
        grant = backend.acquire(theirs)
        if grant is not None:
            assert backend.release(theirs)
        return grant is None
    finally:
        assert backend.release(mine)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("alias", ["default", "optimistic", "insert", "memory"])
def test_two_keys_exclude_each_other_only_if_they_are_one(alias):
    """Case, accents, blanks at the end, line breaks: whatever a collation may take for the same."""

    @settings(FUZZ, max_examples=60)
    @given(one=KEYS, other=KEYS)
    def check(one, other):
        backend = backends[alias]
        assert exclude(backend, one, one)
        for another in (
            other,
            one + " ",
            one.swapcase(),
            unicodedata.normalize("NFD", one),
            unicodedata.normalize("NFC", one),
        ):
            assert exclude(backend, one, another) is (one == another)

    check()


ARGUMENTS = TEXT | st.sampled_from(
    ["1", "-1", "1e9", "nan", "inf", "30d", "0s", "99999999999999999999", "default", "memory"]
)


@pytest.mark.django_db
def test_arguments_of_the_commands():
    """What a command does not take is an error of one line, and nothing else is ever raised."""

    @FUZZ
    @given(
        command=st.sampled_from(["list_locks", "clear_lock", "reap_locks", "run_locked", "lock_bench"]),
        options=st.dictionaries(
            st.sampled_from(
                ["--using", "--share", "--reason", "--idle-for", "--history-for", "--timeout", "--ttl", "--max-hold",
                 "--at-least", "--seconds", "--processes", "--hold-ms"]
            ),
            ARGUMENTS,
            max_size=3,
        ),
        flags=st.sets(st.sampled_from(["--yes", "--stale-only", "--all-shares", "--dry-run", "--all", "--json"])),
        key=st.lists(TEXT, max_size=2),
    )  # fmt: skip
    def check(command, options, flags, key):
        own = {"list_locks": {"--using", "--all", "--json"},
               "clear_lock": {"--using", "--share", "--reason", "--yes", "--stale-only", "--all-shares"},
               "reap_locks": {"--using", "--idle-for", "--history-for", "--dry-run"},
               "run_locked": {"--using", "--timeout", "--ttl", "--max-hold", "--at-least"},
               "lock_bench": {"--seconds", "--processes", "--hold-ms"}}[command]  # fmt: skip
        arguments = [f"{name}={value}" for name, value in options.items() if name in own]
        arguments += sorted(flags & own)
        # Nothing is measured, and nothing is run.
        if command == "lock_bench":
            arguments.append("--using=nobody")
        elif command != "reap_locks" and command != "list_locks":
            arguments += ["--", *key]
        assume("--help" not in arguments)
        try:
            call_command(command, *arguments, stdout=io.StringIO(), stderr=io.StringIO())
        except CommandError as error:
            assert "\n" not in str(error).strip()

    check()
