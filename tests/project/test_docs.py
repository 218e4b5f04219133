"""The documentation: its examples run, and the names in it exist."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import pkgutil
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from asgiref.sync import async_to_sync
from django.core.management import load_command_class
from django.db import connection

import dlocks
from dlocks import (
    Hold,
    Lock,
    LockDeadlock,
    LockLost,
    LockTimeout,
    db_lock,
    db_semaphore,
    lock_lost,
    lock_timeout,
    user_key,
)
from dlocks.testing import lose
from example_project.shop.models import Product, Sale
from tests import jobs, pages
from tests.internals import (
    After,
    Backend,
    DummyBackend,
    HoldRecord,
    InsertBackend,
    MemoryBackend,
    OptimisticBackend,
    PessimisticBackend,
    backends,
    options_of,
)

pytestmark = pytest.mark.front

ROOT = pages.DOCS.parent

database = pytest.mark.django_db(transaction=True)


@pytest.fixture
def lamp(transactional_db):
    return Product.objects.create(name="Lamp", stock=1)


# The tutorial, word for word.


STEP = re.compile(
    r"^```(?P<language>\w+)(?: title=\"(?P<name>\S+)(?P<where> .*?)?\")?\n"
    r"(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


def follow_the_tutorial(directory):
    """Do each step in a directory. Return the outputs of each command line."""
    printed = defaultdict(list)
    environment = {
        # A command of the tutorial calls Python too.
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "PYTHONIOENCODING": "utf-8",
        # A file may change within the second in which its bytecode was written.
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    for step in STEP.finditer((pages.DOCS / "tutorial.md").read_text()):
        if step["language"] == "python":
            path = directory / step["name"]
            path.parent.mkdir(parents=True, exist_ok=True)
            # Text "at the end" is added to the file.
            with path.open("a" if step["where"] else "w") as file:
                file.write(step["text"])
        elif step["language"] == "sh":
            for command in step["text"].splitlines():
                if " pip " not in command:
                    done = subprocess.run(
                        shlex.split(command),
                        cwd=directory, env=environment, text=True,
                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
                    )  # fmt: skip
                    assert done.returncode == 0, f"{command}\n{done.stdout}"
                    printed[command].append(done.stdout)
    return printed


@pytest.mark.engine("sqlite")
@pytest.mark.once
def test_the_tutorial_prints_what_it_shows(tmp_path):
    printed = follow_the_tutorial(tmp_path)
    without, locked, impatient, guarded = printed["python manage.py rush"]
    sold, left = totals(without)
    assert sold > 3
    assert sold + left > 3
    for one in (locked, guarded):
        assert one.splitlines() == ["3 x sold", "5 x sold out", "3 sold, 0 left"]
    sold, left = totals(impatient)
    assert sold + left == 3
    assert "'stock:1' could not be acquired within 0.1 s: held by " in impatient
    assert "x please try again" in impatient
    (listed,) = (
        text for command, (text, *_) in printed.items() if "list_locks" in command
    )
    assert re.search(
        r"^stock:1 +held +.*run_locked python\]$",
        listed,
        re.MULTILINE,
    )
    (tested,) = printed["python manage.py test"]
    assert "Ran 2 tests" in tested
    assert "OK" in tested


@database
def test_the_chinese_tutorial_runs(lamp, in_other_thread):
    """Its examples are pasted whole, below each other."""
    page = pages.run("tutorial.zh-CN")
    paid = []
    assert page.buy(lamp.pk) == "成功"
    assert page.buy_with_a_payment(lamp.pk, paid.append) == "售罄"
    lamp.refresh_from_db()
    assert (lamp.stock, len(paid)) == (0, 1)
    account = SimpleNamespace(
        pk=1, balance=7, save=lambda: None, refresh_from_db=lambda: None
    )
    assert page.withdraw(account, 5) == "已扣款"
    assert page.withdraw(account, 5) == "余额不足"
    assert page.nightly() == "完成"
    assert in_other_thread(page.nightly) is None


def totals(text):
    return tuple(
        map(int, re.search(r"^(\d+) sold, (\d+) left$", text, re.MULTILINE).groups())
    )


# The how-to pages.


@database
@pytest.mark.parametrize("readme", ["README", "README.zh-CN"])
def test_the_examples_of_the_readme(readme):
    done = []
    product = SimpleNamespace(stock=5, save=lambda: done.append("saved"))
    rows = SimpleNamespace(update=lambda **values: done.append(values))
    objects = SimpleNamespace(get=lambda pk: product, filter=lambda pk: rows)
    page = pages.run(
        f"../{readme}",
        Product=SimpleNamespace(objects=objects),
        build_report=lambda: done.append("built"),
        withdraw=lambda *what: done.append(what),
        ask_the_supplier=lambda: 12,
    )
    assert done == ["saved", "built", (12, 100), {"price": 12}]
    assert product.stock == 4
    page.nightly()


@database
def test_the_example_of_the_index(lamp):
    pages.run("index").buy(lamp.pk)
    lamp.refresh_from_db()
    assert lamp.stock == 0


def test_the_readmes_have_the_same_figures_and_links():
    """The pages load no foreign resources."""
    english, chinese = (
        re.findall(r"[\d,]+ µs|\]\((?!README)[^)]+\)", (ROOT / name).read_text())
        for name in ("README.md", "README.zh-CN.md")
    )
    assert sorted(english) == sorted(chinese)
    text = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in text
    # A link, and no source of what a page fetches: test_search.py looks.
    assert re.findall(r"^(.*)http", text, re.MULTILINE) == ["repo_url: "]


def test_the_documentation_has_at_most_22_000_words():
    """The README has at most 1,100. Links are pages about the project."""
    read = {path for path in pages.DOCS.rglob("*.md") if not path.is_symlink()}
    read.remove(pages.DOCS / "tutorial.zh-CN.md")
    for paths, limit in ((read, 22_000), ([ROOT / "README.md"], 1_100)):
        assert sum(len(path.read_text().split()) for path in paths) <= limit


def test_the_reference_lists_each_method_and_its_asynchronous_one():
    """Some names are listed that have no other: ``held()`` sends no request."""
    for page, kind, others in (
        ("locks", Lock, {"held"}),
        ("holds", Hold, {"held", "remaining", "owner"}),
    ):
        text = (pages.DOCS / "reference" / f"{page}.md").read_text()
        listed = set(re.findall(r"^        - (\w+)$", text, re.MULTILINE))
        twins = {name for name in dir(kind) if hasattr(kind, f"a{name}")}
        assert "release" in twins
        assert twins | {f"a{name}" for name in twins} | others <= listed, page


@database
def test_the_examples_on_waiting(in_other_thread, worker, until):
    page = pages.run("how-to/waiting")
    assert page.ship(7) == "shipped after 0 s"
    assert page.report() == "built"
    assert page.refresh() == "refreshed"
    assert page.reindex(range(3)) == 3
    with db_lock("report"):
        assert in_other_thread(page.report) == "another report is being built"
    with db_lock("order:7"):
        page.db_lock = lambda key, timeout: db_lock(key, timeout=0)
        assert re.fullmatch(
            r"not now: held by .* left on its lease", in_other_thread(page.ship, 7)
        )
    # A long job stops for a waiter.
    page = pages.run("how-to/waiting")

    def pages_to_index():
        yield 1
        worker.start(jobs.wait_quietly, "search-index", timeout=30)
        # The page's own hold, which this thread enters once more.
        with db_lock("search-index") as hold:
            until(hold.queue_length)
        yield 2
        yield 3

    assert page.reindex(pages_to_index()) == 2
    worker.hear()


@database
def test_the_examples_on_sharing_keys_of_users_and_several_keys(in_other_thread):
    page = pages.run("how-to/read-write-and-semaphore")
    assert page.search("lamp") == "found lamp"
    assert page.rebuild() == "rebuilt"
    assert page.rebuild_then_check() == "checked"
    assert page.print_out(3) == "3 pages"
    assert page.print_two() == 2
    assert page.ask(lambda: "in stock") == "in stock"
    assert not db_lock("printer").locked()
    with page.catalogue.read():
        assert in_other_thread(page.search, "lamp") == "found lamp"
    page, ada = pages.run("how-to/keys-of-users"), SimpleNamespace(pk=7)
    assert page.export(ada, "all: of it\n") == "all: of it\n is built"

    def save(more):
        return page.upload(ada, lambda: save(more - 1)) if more else "saved"

    assert page.upload(ada, lambda: save(2)) == "saved"
    refused = "three of your uploads are on their way already"
    assert page.upload(ada, lambda: save(3)) == refused
    with db_semaphore(user_key("uploads", 7), permits=1):
        assert page.upload(SimpleNamespace(pk=8), lambda: "saved") == "saved"
    done, lines = [], [SimpleNamespace(product_id=number) for number in (2, 1, 2)]
    page = pages.run(
        "how-to/several-keys",
        transfer=lambda *what: done.append(what),
        ship=done.append,
    )
    assert page.pay(12, 7, 5).keys() == {"account:12", "account:7"}
    page.deliver(order := SimpleNamespace(lines=lines))
    assert done == [(12, 7, 5), order]
    assert not db_lock("account:12").locked()


@database
def test_the_examples_on_deadlocks(threads):
    page = pages.run("how-to/deadlocks")
    both, lock = threading.Barrier(2), page.db_lock

    @contextlib.contextmanager
    def meet(key):
        """Acquire, and let both callers acquire their first keys."""
        with lock(key):
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(20)
            both.abort()
            yield

    page.db_lock = meet
    callers = [threads(lambda: page.pay(12, 7)), threads(lambda: page.cancel(12, 7))]
    errors = []
    for caller in callers:
        try:
            caller.join(60)
        except LockDeadlock as error:
            errors.append(str(error))
    (message,) = errors
    assert "together: db_lock('account:12', 'invoice:7')." in message


@database
def test_the_examples_on_leader_election():
    did, serving = [], threading.Event()

    def run_due_tasks(token):
        did.append(token)
        command.election.stop()

    scheduler = SimpleNamespace(
        start=lambda: did.append("start") or serving.set(),
        shutdown=lambda: did.append("shutdown"),
    )
    page = pages.run(
        "how-to/leader-election",
        run_due_tasks=run_due_tasks,
        scheduler=scheduler,
        serve_forever=lambda: serving.wait(20),
    )
    command = page.Command()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        command.handle()
    finally:
        signal.signal(signal.SIGTERM, handler)
    page.serve()
    token, *rest = did
    assert token > 0
    assert rest == ["start", "shutdown"]


@pytest.mark.engine("postgresql")
@database
def test_the_examples_on_session_locks():
    page = pages.run("how-to/session-locks")
    assert not page.hold.held
    assert page.DLOCKS["session"]["OPTIONS"] == {"database": "default"}


@database
def test_the_examples_on_guarded_commits(lamp):
    page = pages.run("how-to/guarded-commits")
    assert page.sell(lamp.pk, "Ada", lambda: None) == "sold"
    assert page.sell(lamp.pk, "Bob", lambda: None) == "sold out"
    Product.objects.update(stock=1)
    with pytest.raises(LockLost):
        page.sell(lamp.pk, "Bob", lambda: lose(f"stock:{lamp.pk}"))
    assert Sale.objects.count() == 1
    assert Product.objects.get().stock == 1
    assert async_to_sync(page.rename)(lamp.pk, "Lantern") == 1


@database
def test_the_examples_on_transactions(lamp, is_busy):
    page = pages.run("how-to/transactions")
    page.restock(lamp.pk, 2)
    assert Product.objects.get().stock == 3
    assert not is_busy(f"stock:{lamp.pk}")
    if connection.vendor == "sqlite":
        with pytest.raises(RuntimeError, match=r"cannot be acquired here\. SQLite"):
            page.pay(7)
    else:
        assert page.pay(7) == "lease"
    assert page.close_books(7) == "closed"


@database
async def test_the_examples_on_coroutines():
    page = pages.run("how-to/async")
    assert await page.ship(7) > 0
    assert await page.ship_if_free(7) == "order:7"
    assert await page.build_report("north") == "report of north"
    assert await page.two_tasks() is None
    assert await page.close_books(7) == "closed"
    async with db_lock("order:7"):
        assert await asyncio.create_task(page.ship_if_free(7)) is None


@database
def test_the_examples_on_seeing_and_clearing(in_other_thread, caplog):
    page = pages.run("how-to/seeing-and-clearing")
    try:
        assert page.who() == []
        with pytest.raises(LockLost), db_lock("stock:7"):
            (shown,) = page.who()
            assert re.fullmatch(
                r".*:\d+:MainThread \(.*\) for .* s, \d+ s left on its lease", shown
            )
            with pytest.raises(LockTimeout):
                in_other_thread(db_lock("stock:7", timeout=0).acquire)
            lose("stock:7")
        told = [one.getMessage() for one in caplog.records if one.name == "shop"]
        late, lost = "stock:7 timed out after 0.0 s: ", "lost stock:7 (token"
        assert told[0].startswith(late) or lost in told[0]
        assert lost in told[-1]
    finally:
        lock_lost.disconnect(page.on_lost)
        lock_timeout.disconnect(page.on_timeout)


@database
def test_the_examples_on_history(settings):
    option, *_ = pages.blocks("how-to/history")
    settings.DLOCKS = evaluated(option)
    page = pages.run("how-to/history")
    HoldRecord.objects.create(
        key_resource="stock:7",
        token=1,
        waited=2,
        shared=False,
        begin_time=After(-1),
        end_time=After(0),
    )
    assert page.most_waited_for() == [
        {"key_resource": "stock:7", "waits": 1, "longest": 2}
    ]
    assert page.ships_once() == 1
    text = (pages.DOCS / "how-to/history.md").read_text()
    told = {
        name
        for cell in re.findall(r"^\| (`.*`) \|", text, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", cell)
    }
    assert told == {field.name for field in HoldRecord._meta.fields} - {"id"}


@database
def test_the_examples_on_settings(settings):
    defaults, observed, aliases, _ = pages.blocks("how-to/settings")
    settings.DLOCKS = evaluated(observed)
    assert backends["default"].expiry == "observed"
    settings.DLOCKS = evaluated(defaults)
    written = backends["default"]
    plain = PessimisticBackend("default")
    options = evaluated(defaults)["default"]["OPTIONS"]
    assert options.keys() == options_of(PessimisticBackend)
    for option in options.keys() - {"listen", "prepare"}:
        assert getattr(written, option) == getattr(plain, option)
    assert written.notifications.listen is plain.notifications.listen is None
    assert written.session.prepare is plain.session.prepare is None
    text = (pages.DOCS / "how-to/settings.md").read_text()
    assert all(f"`{option}`" in text for option in options)
    settings.DLOCKS = evaluated(aliases)
    assert pages.run("how-to/settings").run() == "jobs:import"
    for page in ("how-to/waiting", "backends"):
        settings.DLOCKS = evaluated(
            next(block for block in pages.blocks(page) if block.startswith("DLOCKS"))
        )
        assert backends["default"].database == "default"


def evaluated(code):
    return ast.literal_eval(code.removeprefix("DLOCKS = "))


# The pages about migrating from other locks.


@database
def test_the_examples_on_coming_from_other_locks(in_other_thread, monkeypatch):
    page = pages.run("migrating/django-db-mutex")
    assert page.nightly(lambda: "built") == "built"
    assert page.nightly(lambda: lose("nightly-report")) == "done, but the lock was lost"
    with db_lock("nightly-report"):
        refused = in_other_thread(page.nightly, lambda: "built")
    assert refused.startswith("already running: ")
    page = pages.run("migrating/django-pglock")
    assert page.start(lambda: "ran") == "ran"
    assert page.report() == "built"
    with db_lock("import"), db_lock("report"):
        assert in_other_thread(page.start, lambda: "ran") is None
        assert in_other_thread(page.report) is None
    page = pages.run("migrating/redis-py")
    assert page.work(lambda: None, lambda: "done") == "done"
    assert page.work(lambda: lose("stock:7"), lambda: "done") == "it was lost"
    impatient = lambda key, ttl, timeout: db_lock(key, ttl=ttl, timeout=0)  # noqa: E731
    monkeypatch.setattr(page, "db_lock", impatient)
    with db_lock("stock:7"):
        refused = in_other_thread(page.work, lambda: None, lambda: "done")
    assert refused.startswith("held by ")
    page = pages.run("migrating/shedlock")
    assert page.nightly_report() == "sent"
    assert page.nightly_report() is None


# References in the pages.


async def test_the_example_on_servers():
    """The application answers a server that starts, as Django's own does not."""
    application = pages.run("how-to/async").application
    sent = []

    async def receive():
        if sent:
            await asyncio.Event().wait()
        return {"type": "lifespan.startup"}

    async def send(message):
        sent.append(message["type"])

    serving = asyncio.create_task(application({"type": "lifespan"}, receive, send))
    while not sent:
        await asyncio.sleep(0)
    serving.cancel()
    assert sent == ["lifespan.startup.complete"]


def table(page, heading):
    """Return the text of a page, and the rows of its tables below a heading."""
    text = (pages.DOCS / f"{page}.md").read_text()
    part = text.partition(f"\n## {heading}")[2].partition("\n## ")[0]
    rows = [line for line in part.splitlines() if line.startswith("| ")]
    return text, [row for row in rows if not re.match(r"\| (What hap|The case)", row)]


@pytest.mark.parametrize("page", ["safety", "reliability"])
def test_every_test_named_on_a_page_exists(page):
    """Each row of a table of cases names its test, or the reason why there is none."""
    if page == "safety":
        text, rows = table(page, "What happens when")
        found = re.findall(r"`((?:\w+/)*\w+\.py)::(test_\w+)`", text)
        named = [(f"tests/{file}", test) for file, test in found]
        assert len(named) > 40
        assert len(rows) > 40
        assert [row for row in rows if ".py::test_" not in row] == []
    else:
        text, rows = table(page, "Case by case")
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text)
        assert len(named) > 150
        assert len(named) == text.count("::"), "a name is not written as file::test"
        assert len(rows) > 70
        reason = r"::test_|\*\*Not tested\*\*|\*\*Does not apply\*\*"
        assert [row for row in rows if not re.search(reason, row)] == []
        assert [row for row in rows if row.count("|") != 3] == []
    tests = {
        file: set(re.findall(r"def (test_\w+)\(", (ROOT / file).read_text()))
        for file, _ in named
    }
    assert [(file, test) for file, test in named if test not in tests[file]] == []


MEMBERS = re.compile(r"^::: (\S+)\n((?: +.*\n)+)", re.MULTILINE)


def test_each_name_in_the_reference_exists():
    """One of them is an attribute of each hold, and not of the class."""
    listed = [
        f"{path}.{name}"
        for page in (pages.DOCS / "reference").glob("*.md")
        for path, options in MEMBERS.findall(page.read_text())
        for name in re.findall(
            r"\w+", " ".join(re.findall(r"members:((?: \[.*\]|\n +- \w+)+)", options))
        )
    ]
    assert len(listed) > 60
    assert [name for name in listed if find(name) is None] == [
        "dlocks.core.hold.Hold.scope"
    ]


def find(path):
    """Return the object of a dotted path, or None."""
    try:
        return pkgutil.resolve_name(path)
    except (AttributeError, ImportError):
        return None


def test_the_documented_checks_are_the_existing_ones():
    code = "\n".join(path.read_text() for path in (ROOT / "dlocks").rglob("*.py"))
    text = (pages.DOCS / "how-to/seeing-and-clearing.md").read_text()
    known = {
        check
        for check in re.findall(r"\"dlocks\.([EW]\d{3})\"", code)
        if check < "E020" or check > "E025"
    }
    assert known <= (found := set(re.findall(r"dlocks\.([EW]\d{3})", text)))
    assert found - known == {"E020", "E025"}


def test_every_flag_of_a_backend_is_documented():
    text = (pages.DOCS / "reference/backends.md").read_text()
    flags = {name for name, value in vars(Backend).items() if isinstance(value, bool)}
    assert flags == set(
        re.findall(
            r"^\| `(exclusive|\w+_in_(?:queue|statement)|supports_\w+)` \|",
            text,
            re.MULTILINE,
        )
    )
    database_backends = PessimisticBackend, OptimisticBackend, InsertBackend
    for kind in (*database_backends, MemoryBackend, DummyBackend):
        told = {flag: getattr(kind, flag) for flag in pages.TOLD_AS}
        assert pages.told_of(kind) == told
        pages.check_refusals(kind("default"))
    # These flags only concern authors of backends.
    flags -= {"exclusive", "supports_fencing", "grants_in_queue", "waits_in_statement"}
    assert pages.TOLD_AS.keys() == flags


def test_the_documented_options_of_a_command_exist():
    """Every public name is in the reference too."""
    page = (pages.DOCS / "reference/commands.md").read_text()
    for command in (
        "list_locks", "clear_lock", "reap_locks", "run_locked", "dlocks_health",
    ):  # fmt: skip
        found = load_command_class("dlocks", command)
        own = {
            option
            for action in found.create_parser("manage.py", command)._actions
            for option in action.option_strings
            if option not in DJANGOS and option.startswith("--")
        }
        text = page.partition(f"## {command}\n")[2].partition("\n## ")[0]
        assert set(re.findall(r"--[a-z][a-z-]*", text)) == own, command
    paths = (pages.DOCS / "reference").glob("*.md")
    named = set(re.findall(r"\w+", "\n".join(path.read_text() for path in paths)))
    assert [name for name in dlocks.__all__ if name not in named] == []


DJANGOS = {
    "--help", "--version", "--verbosity", "--settings", "--pythonpath", "--traceback",
    "--no-color", "--force-color",
    "--skip-checks",
}  # fmt: skip
