"""Random input works or is refused by name, and keys are never confused.

A refusal comes before any query.
"""

from __future__ import annotations

import io
import unicodedata
from contextlib import suppress

import pytest
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import override_settings
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from dlocks import Lock, db_lock, db_rwlock, db_semaphore, user_key
from dlocks.testing import held_elsewhere, override_locks
from dlocks.values import KEY_LENGTH
from tests.promises.locks.keys import is_taken
from tests.volume import volume

pytestmark = pytest.mark.front

FUZZ = settings(
    max_examples=volume(100),
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
REFUSED = (ValueError, TypeError)

# The texts include surrogates and NUL, and characters that databases, shells or people
# confuse.
TEXT = st.text(
    st.characters()
    | st.sampled_from("\0\ud800%:'\"\\ \t\n\rAaäÄßıİK\u0301\u200b\u202e🔒"),
    max_size=300,
)
KEYS = st.text(
    st.sampled_from("aAäÄ\u0308ßıi %:\\'\"\t\n\r\x01🔒"), min_size=1, max_size=6
)
ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([10**400, -1, 0, 1, 2**31, 1e308, object(), len, b"x"])
    | TEXT
    | st.binary(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(TEXT | st.integers(), inner, max_size=3)
    ),
    max_leaves=4,
)
POLICY = [
    "using", "timeout", "ttl", "renew", "max_hold", "reentrant", "scope", "release_at",
    "min_hold", "takeover", "fair",
    "on_lost", "permits", "shared",
]  # fmt: skip


class QueryError(Exception):
    """A query was about to be sent."""


@pytest.fixture
def no_queries(monkeypatch):
    """Refuse every query of any database."""

    def refuse(*args, **kwargs):
        raise QueryError

    for connection in connections.all():
        monkeypatch.setattr(connection, "cursor", refuse)
        monkeypatch.setattr(connection, "connect", refuse)


@pytest.mark.usefixtures("no_queries")
class TestRefusals:
    @FUZZ
    @given(key=TEXT | ANY, more=st.lists(TEXT | ANY, max_size=2))
    def test_any_key_works_or_is_refused(self, key, more):
        """This includes locks on several keys."""
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
    @given(
        policy=st.dictionaries(st.sampled_from(POLICY), ANY, max_size=3),
        kind=st.integers(0, 3),
    )
    def test_any_option_of_a_lock_works_or_is_refused(self, policy, kind):
        """Options that raise no TypeError or ValueError at once work."""
        makers = [
            db_lock,
            db_rwlock,
            lambda key, **policy: db_semaphore(key, **{"permits": 3, **policy}),
            Lock,
        ]
        try:
            lock = makers[kind](**{"key": "fuzz", **policy})
            one = lock.read() if kind == 1 else lock
            assert isinstance(one, Lock)
        except REFUSED:
            return
        # This backend sends no queries, and does not support each policy.
        with suppress(*REFUSED, RuntimeError, ImproperlyConfigured):
            with override_locks("dummy"), one:
                pass

    @FUZZ
    @given(configured=ANY | st.dictionaries(st.just("default"),
        ANY) | st.fixed_dictionaries(
        {"default": st.dictionaries(st.sampled_from(["BACKEND", "OPTIONS", "X"]),
        ANY)}
    ))  # fmt: skip
    @example({"default": {"BACKEND": 5}})
    @example({"default": {"BACKEND": "."}})
    @example({"default": {"BACKEND": "\0.x"}})
    @example({"default": {"BACKEND": "dlocks.backends.base.Backend", "OPTIONS": 5}})
    def test_any_value_of_the_setting_works_or_is_refused(self, configured):
        """Any value of ``DLOCKS`` works or is refused."""
        with override_settings(DLOCKS=configured):
            refused = use("default")
        assert not refused or "DLOCKS" in refused


def use(using) -> str:
    """Return why a lock of an alias refuses its settings. Send no query."""
    try:
        db_lock("fuzz", using=using, scope="transaction").acquire()
    except ImproperlyConfigured as error:
        return str(error)
    except RuntimeError:
        # The lock is refused outside of a transaction.
        return ""
    return pytest.fail("the lock was acquired outside of a transaction")


# The options that a backend requires.
NEEDED = {
    "dlocks.backends.database.PessimisticBackend": {},
    "dlocks.backends.database.OptimisticBackend": {},
    "dlocks.backends.database.InsertBackend": {},
    "dlocks.backends.session.SessionBackend": {},
    "dlocks.backends.memory.MemoryBackend": {},
    "dlocks.backends.dummy.DummyBackend": {},
    "dlocks.backends.quorum.QuorumBackend": {"of": ["member"]},
}

LEASES = ["grace", "prefix", "slow_hold", "slow_wait", "timeout", "ttl"]
SESSIONS = ["database", "deadlock_after", "linger", "ping", "waiting"]
ROWS = ["database", "deadlock_after", "expiry", "history", "listen", "prepare"]
OPTIONS = {
    path: LEASES
    + (ROWS if "database" in path else [])
    + (SESSIONS if "session" in path else [])
    + (["drift", "node_timeout", "of"] if "quorum" in path else [])
    for path in NEEDED
}


def refusals(path, options):
    """Return the messages of the check about a backend with these options.

    The lock itself refuses the same options.
    """
    member = {"BACKEND": "dlocks.backends.memory.MemoryBackend"}
    configured = {"fuzzed": {"BACKEND": path, "OPTIONS": options}, "member": member}
    with override_settings(DLOCKS=configured):
        messages = run_checks(tags=["dlocks"], databases=[])
        said = {message.msg for message in messages if message.is_serious()}
        assert said or not use("fuzzed")
        return said


class TestOptions:
    @settings(FUZZ, max_examples=volume(60))
    @given(
        one=st.sampled_from(
            [(path, name) for path in NEEDED for name in OPTIONS[path]]
        ),
        value=ANY,
    )
    @example(
        one=("dlocks.backends.database.PessimisticBackend", "expiry"),
        value=["observed"],
    )
    @example(one=("dlocks.backends.quorum.QuorumBackend", "of"), value=[["member"]])
    def test_a_wrong_backend_option_is_named(self, one, value):
        """The check and the lock agree."""
        path, name = one
        wrong = refusals(path, NEEDED[path] | {name: value}) - refusals(
            path, NEEDED[path]
        )
        assert all("DLOCKS['fuzzed']" in said and name in said for said in wrong)


class TestUserKeys:
    @FUZZ
    @given(
        parts=st.lists(TEXT | st.integers() | st.uuids() | ANY, max_size=4),
        namespace=TEXT | ANY | st.just("n"),
    )
    def test_user_keys_are_valid_or_refused(self, namespace, parts):
        try:
            key = user_key(namespace, *parts)
        except REFUSED:
            return
        assert db_lock(key).key == key
        assert key.isascii()
        assert key.isprintable()
        assert len(key) <= 200

    @FUZZ
    @given(
        one=st.lists(KEYS | st.just(""), min_size=1, max_size=4),
        other=st.lists(KEYS, min_size=1, max_size=4),
    )
    def test_user_keys_are_equal_only_for_equal_parts(self, one, other):
        assert (user_key("n", *one) == user_key("n", *other)) == (one == other)
        joined = ":".join(one)
        assert (user_key("n", joined) == user_key("n", *one)) == ([joined] == one)
        # This includes long keys.
        assert (user_key("n", *one, "x" * 500) == user_key("n", *other, "x" * 500)) == (
            one == other
        )


def exclude(using: str, one: str, other: str) -> bool:
    """Return whether two keys exclude each other."""
    with held_elsewhere(one, using=using):
        return is_taken(other, using)


@pytest.mark.storage
@pytest.mark.django_db(transaction=True)
def test_only_equal_keys_exclude_each_other():
    """A collation may ignore case, accents, trailing blanks and line breaks."""

    @settings(FUZZ, max_examples=volume(30))
    @given(
        alias=st.sampled_from(["default", "optimistic", "insert", "memory"]),
        one=KEYS,
        other=KEYS,
    )
    def check(alias, one, other):
        assert exclude(alias, one, one)
        for another in {
            other,
            one + " ",
            one.swapcase(),
            unicodedata.normalize("NFD", one),
            unicodedata.normalize("NFC", one),
        } - {one}:
            assert not exclude(alias, one, another), another

    check()


ARGUMENTS = TEXT | st.sampled_from(["1", "-1", "1e9", "nan", "inf", "30d", "0s",
    "99999999999999999999", "default", "memory"])  # fmt: skip


@pytest.mark.django_db
def test_any_command_argument_works_or_is_an_error():
    """An invalid argument is an error of one line, and no other error is raised."""

    @FUZZ
    @given(
        command=st.sampled_from(["list_locks", "clear_lock", "reap_locks",
        "run_locked"]),
        options=st.dictionaries(
            st.sampled_from(
                ["--using", "--share", "--reason", "--idle-for", "--history-for",
                "--timeout", "--ttl", "--max-hold", "--min-hold"]
            ),
            ARGUMENTS,
            max_size=3,
        ),
        flags=st.sets(st.sampled_from(["--yes", "--stale-only", "--show-arguments",
        "--dry-run", "--all", "--json"])),
        key=st.lists(TEXT, max_size=2),
    )  # fmt: skip
    def check(command, options, flags, key):
        own = {"list_locks": {"--using", "--all", "--json"},
               "clear_lock": {"--using", "--share", "--reason", "--yes",
               "--stale-only"},
               "reap_locks": {"--using", "--idle-for", "--history-for", "--dry-run"},
               "run_locked": {"--using", "--timeout", "--ttl", "--max-hold",
               "--min-hold", "--show-arguments"}}[command]  # fmt: skip
        arguments = [
            f"{name}={value}" for name, value in options.items() if name in own
        ]
        arguments += sorted(flags & own)
        # No command is run.
        if command != "reap_locks" and command != "list_locks":
            arguments += ["--", *key]
        assume("--help" not in arguments)
        try:
            call_command(
                command, *arguments, stdout=io.StringIO(), stderr=io.StringIO()
            )
        except CommandError as error:
            # argparse quotes an unknown argument as it is.
            if "unrecognized arguments" not in str(error):
                assert "\n" not in str(error).strip()

    check()
