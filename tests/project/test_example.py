"""The example project: its purchase function, pages and flash sale."""

from __future__ import annotations

import html
import os
import re
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from django.contrib.auth import get_user_model
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection
from django.test import Client

from dlocks import LockTimeout, db_lock
from example_project.shop import services, views
from example_project.shop.backstage import ONE_AT_A_TIME
from example_project.shop.crowd import CrowdError
from example_project.shop.management.commands import run_flash_sale
from example_project.shop.models import FlashSale, Product, Sale
from example_project.shop.sale import Round
from example_project.shop.services import ALIASES, LOCKS, NO_LOCK, ROW, buy
from tests.processes import living

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = pytest.mark.engine("sqlite")


@pytest.fixture
def product(transactional_db):
    return Product.objects.create(name="Cup", stock=2)


@pytest.fixture
def last_one(transactional_db):
    return Product.objects.create(name="Biscuit", stock=1)


@pytest.fixture
def meanwhile(monkeypatch):
    """Return a function that runs another one during the first payment check."""

    def let(function):
        pending = [function]
        monkeypatch.setattr(
            services, "_check_payment", lambda: pending and pending.pop()()
        )

    return let


# Purchases.


def test_the_shop_sells_no_more_than_its_stock(transactional_db):
    for lock in LOCKS:
        product = Product.objects.create(name=f"Cup, {lock}", stock=2)
        purchases = [buy(product.pk, f"buyer {number}", lock) for number in range(3)]
        assert [purchase.sold for purchase in purchases] == [True, True, False], lock
        disturbed = [one for one in purchases if one.conflicts or one.had_to_wait]
        assert disturbed == [], lock
        product.refresh_from_db()
        assert product.stock == 0
        buyers = sorted(product.sales.values_list("buyer", flat=True))
        assert buyers == ["buyer 0", "buyer 1"], lock


def test_under_a_lock_no_other_buyer_interferes(
    transactional_db, meanwhile, in_other_thread
):
    """Without one, the last item is sold twice. The shop has keys of its own."""
    for lock in ALIASES:
        last = Product.objects.create(name=f"Biscuit, {lock}", stock=1)

        def second(last=last, lock=lock):
            with pytest.raises(LockTimeout):
                in_other_thread(buy, last.pk, "second", lock, timeout=0)

        meanwhile(second)
        with db_lock(f"stock:{last.pk}"):
            assert buy(last.pk, "first", lock).sold
        assert not in_other_thread(buy, last.pk, "second", lock, timeout=0).sold
        assert list(last.sales.values_list("buyer", flat=True)) == ["first"], lock
    last, both = Product.objects.create(name="Biscuit", stock=1), []
    meanwhile(lambda: both.append(buy(last.pk, "second", NO_LOCK)))
    both.append(buy(last.pk, "first", NO_LOCK))
    assert [purchase.sold for purchase in both] == [True, True]
    last.refresh_from_db()
    assert (last.stock, last.sales.count()) == (0, 2)


def test_a_conflicting_buyer_reads_the_row_again(product, last_one, meanwhile):
    """The last item is sold once."""
    for one, sold, stock in ((product, True, (0, 2)), (last_one, False, (0, 1))):
        meanwhile(lambda one=one: buy(one.pk, "second", ROW))
        purchase = buy(one.pk, "first", ROW)
        assert (purchase.sold, purchase.conflicts) == (sold, 1)
        one.refresh_from_db()
        assert (one.stock, one.sales.count()) == stock


def test_a_busy_database_is_retried(product, monkeypatch):
    """Other errors are not retried. Conflicts are retried until the timeout."""
    errors = [OperationalError("database is locked")] * 2

    def write(product):
        if errors:
            raise errors.pop()
        return True

    monkeypatch.setattr(services, "_write_what_was_read", write)
    purchase = buy(product.pk, "first", NO_LOCK)
    assert purchase.sold
    assert purchase.conflicts == 2
    Sale.objects.all().delete()
    errors.append(OperationalError("disk I/O error"))
    with pytest.raises(OperationalError):
        buy(product.pk, "first")
    monkeypatch.setattr(services, "_write_where_unchanged", lambda product: False)
    with pytest.raises(services.TooBusyError):
        buy(product.pk, "first", ROW, timeout=0.01)
    assert not Sale.objects.exists()


# Pages.


def test_the_shop_lists_its_products(transactional_db, client):
    """It shows no product of a flash sale. An empty shop says how to fill it.

    A sold-out or missing product cannot be bought. The page about deadlocks shows one:
    one clerk is refused with the reason, and the other one has both keys.
    """
    assert "demo_data" in client.get("/shop/").content.decode()
    Product.objects.create(name="Flash sale, no lock", stock=1)
    product = Product.objects.create(name="Cup", stock=2)
    buy(product.pk, "grace")
    page = client.get("/shop/").content.decode()
    row = r'Cup</td>\s*<td class="number">1</td>\s*<td class="number">1</td>'
    assert re.search(row, page)
    assert "/admin/" in page
    assert "Flash sale, no lock" not in page
    buy(product.pk, "grace")
    answer = client.post(f"/shop/products/{product.pk}/buy/", follow=True)
    page = answer.content.decode()
    assert client.post("/shop/products/4711/buy/").status_code == 404
    assert "is sold out" in page
    assert "<button disabled" in page
    assert product.sales.count() == 2
    assert "Let them meet" in client.get("/shop/deadlock/").content.decode()
    page = client.post("/shop/deadlock/").content.decode()
    assert page.count("because of a deadlock") == 1
    assert page.count("has had both keys") == 1


def test_the_admin_adds_pieces_under_a_lock(product, admin_client, in_other_thread):
    """A busy product is left unchanged. A conflict of two people is shown."""
    data = {"action": "restock", "_selected_action": [product.pk]}
    admin_client.post("/admin/shop/product/", data)
    product.refresh_from_db()
    assert product.stock == 12
    hold = in_other_thread(db_lock(services.key_of(product.pk)).acquire)
    answer = admin_client.post("/admin/shop/product/", data, follow=True)
    hold.release()
    assert "held by" in answer.content.decode()
    product.refresh_from_db()
    assert product.stock == 12
    address = f"/admin/shop/product/{product.pk}/change/"
    page = admin_client.get(address).content.decode()
    token = re.search(r'name="row_version" value="([^"]+)"', page)[1]
    buy(product.pk, "grace")
    fields = {"name": "Cup", "stock": "50", "row_version": token}
    answer = admin_client.post(address, fields)
    assert "Now in the database" in answer.content.decode()
    product.refresh_from_db()
    assert product.stock == 11


def test_a_purchase_needs_a_csrf_token(product):
    """It is confirmed, and recorded with the name of the user."""
    client = Client(enforce_csrf_checks=True)
    address = f"/shop/products/{product.pk}/buy/"
    assert client.get(address).status_code == 405
    assert client.post(address).status_code == 403
    page = client.get("/shop/").content.decode()
    data = dict(re.findall(r'name="(csrfmiddlewaretoken)" value="(\w+)"', page)[:1])
    assert client.post(address, data).status_code == 302
    assert product.sales.get().buyer == "a guest"
    client = Client()
    client.force_login(get_user_model().objects.create_user("ada"))
    answer = client.post(address, follow=True)
    assert answer.redirect_chain == [("/shop/", 302)]
    assert "You have bought “Cup”" in answer.content.decode()
    assert product.sales.latest("pk").buyer == "ada"


def test_a_customer_who_waits_too_long_gets_a_409(
    product, client, in_other_thread, monkeypatch
):
    monkeypatch.setattr(views, "TIMEOUT", 0.05)
    hold = in_other_thread(db_lock(services.key_of(product.pk)).acquire)
    try:
        answer = client.post(f"/shop/products/{product.pk}/buy/")
    finally:
        hold.release()
    assert answer.status_code == 409
    assert "Please try again" in answer.content.decode()
    assert not product.sales.exists()
    assert client.post(f"/shop/products/{product.pk}/buy/").status_code == 302


# Commands.


def test_demo_data_is_for_debugging_only(transactional_db, settings):
    """The other command refuses invalid arguments."""
    with pytest.raises(CommandError, match="DEBUG"):
        call_command("demo_data")
    assert not get_user_model().objects.exists()
    for arguments, complaint in (
        ("--buyers -1", "between 2 and 10000"),
        ("--buyers many", "not a whole number"),
        ("--buyers 999999999999999999999", "between 2 and 10000"),
        ("--stock 0", "between 1 and 9999"),
        ("--stock 1.5", "not a whole number"),
        ("--processes 1", "between 2 and 64"),
        ("--processes 100000", "between 2 and 64"),
        ("--buyers 100 --stock 100", "must be more than --stock"),
        ("--buyers 5 --stock 4 --processes 6", "cannot be more than --buyers"),
    ):
        with pytest.raises(CommandError, match=complaint):
            call_command("flash_sale", *arguments.split())
    assert not Product.objects.exists()
    settings.DEBUG = True
    for _ in range(2):
        output = StringIO()
        call_command("demo_data", stdout=output)
        assert "'admin'" in output.getvalue()
    assert get_user_model().objects.get().check_password("admin")
    assert Product.objects.get(name="Cup").stock == 100


# The page of the flash sale. Its scripts are tested in test_shop_browser.py.

FLASH_SALE = "/shop/flash-sale/"


@pytest.mark.once
def test_the_page_refuses_invalid_input_next_to_its_field(transactional_db, client):
    """No sale starts, and the input is kept."""
    pieces = "There must be at least one piece to sell."
    errors_of_locks = [
        "Choose at least one lock.",
        "“padlock” is not one of the locks.",
    ]
    for stock, buyers, locks, complaint in (
        ("-5", "100", LOCKS, pieces),
        ("0", "100", LOCKS, pieces),
        ("99999999", "100", LOCKS, "There can be at most 1,000 pieces."),
        ("", "100", LOCKS, "How many pieces are there?"),
        ("1.5", "100", LOCKS, "That is not a whole number."),
        ("50", "1000000000", LOCKS, "There can be at most 2,000 buyers."),
        ("50", "1", LOCKS, "There must be at least two buyers."),
        ("50", "50", LOCKS, "There must be more buyers than pieces."),
        ("5", "12", [], errors_of_locks[0]),
        ("5", "12", ["padlock"], errors_of_locks[1]),
    ):
        data = {"stock": stock, "buyers": buyers, "locks": locks}
        page = client.post(FLASH_SALE, data, follow=True).content.decode()
        assert complaint in html.unescape(page)
        if complaint in errors_of_locks:
            continue
        wrong = re.findall(r'<input[^>]*aria-invalid="true"[^>]*>', page)
        assert len(wrong) == 1, complaint
        (described,) = re.findall(r'aria-describedby="([^"]+)"', wrong[0])
        error = rf'id="{described}"[^>]*>\s*(?:<li>)?([^<]+?)\s*<'
        (text,) = re.findall(error, page)
        assert html.unescape(text) == complaint
        kept = rf'<input[^>]*name="stock"[^>]*value="{re.escape(stock)}"'
        assert not stock or re.search(kept, page), complaint
    assert not FlashSale.objects.exists()


def test_a_second_sale_is_refused_while_one_is_running(
    transactional_db, client, in_other_thread, monkeypatch
):
    """The page acquires a lock for the sale. A sale whose process died is aborted.

    A failed sale shows the message of its error, no traceback and no class of Python.
    """
    hold = in_other_thread(db_lock("flash-sale").acquire)
    data = {"stock": "5", "buyers": "12", "locks": LOCKS}
    page = client.post(FLASH_SALE, data, follow=True).content.decode()
    hold.release()
    said = r'role="status">\s*<li class="\w*">A sale is already running, started at '
    assert re.search(said, page)
    assert not FlashSale.objects.exists()
    FlashSale.objects.create(locks=["insert"], stock=5, buyers=12)
    page = client.get(FLASH_SALE).content.decode()
    assert "The sale was aborted: its process has ended." in page
    assert not Product.objects.exists()

    def fail(self, sale):
        raise CrowdError(
            "buyers-1 failed:\nTraceback (most recent call last):\n  File …\n"
            "dlocks.exceptions.LockTimeout: 'a' could not be acquired: held by b"
        )

    monkeypatch.setattr(run_flash_sale.Command, "_sell", fail)
    monkeypatch.setattr("sys.stdin", StringIO(ONE_AT_A_TIME.acquire().detach()))
    sale = FlashSale.objects.create(locks=["insert"], stock=5, buyers=12)
    call_command("run_flash_sale", str(sale.pk))
    sale.refresh_from_db()
    assert sale.trouble == "The sale was aborted. 'a' could not be acquired: held by b"


def test_a_round_reports_broken_promises():
    def complaint(lock, sold, left, **changed):
        known = {"confirmed": sold, "refused": 24 - sold, **changed}
        one = Round(lock, stock=10, buyers=24, sold=sold, left=left, **known)
        return one.complaint

    assert complaint(NO_LOCK, 24, 3) is complaint(ROW, 10, 0) is None
    assert "nothing was oversold" in complaint(NO_LOCK, 10, 0)
    assert "11 were sold of a stock of 10" in complaint("insert", 11, 0)
    assert "9 were sold of a stock of 10" in complaint("insert", 9, 1)
    assert "the product shows 1 left" in complaint("insert", 10, 1)
    confirmed = complaint(ROW, 10, 0, confirmed=11, refused=13)
    assert "11 buyers received a confirmation" in confirmed


def test_flash_sale_oversells_only_without_a_lock(transactional_db, monkeypatch, until):
    """Without tables it says what to run. Ctrl-C leaves no process behind."""
    monkeypatch.setenv("COLUMNS", "100")
    with monkeypatch.context() as patch:
        patch.setattr(connection.introspection, "table_names", list)
        with pytest.raises(CommandError, match=r"manage.py migrate"):
            call_command("flash_sale")
    output = StringIO()
    few = "--stock", "10", "--buyers", "24", "--processes", "2"
    call_command("flash_sale", *few, stdout=output)
    assert "All locks held" in output.getvalue()
    assert "pessimistic: with db_lock(key), the default" in output.getvalue()
    locks = ["pessimistic", "optimistic", "insert", "optimistic row"]
    row = rf"^ (no lock|{'|'.join(locks)}) +(\d+) +(\d+) +(\d+) "
    rows = re.findall(row, output.getvalue(), re.MULTILINE)
    (first, sold, oversold, refused), *others = rows
    assert first == "no lock"
    assert int(sold) > 10
    assert int(oversold) == int(sold) - 10
    assert int(refused) == 24 - int(sold)
    assert others == [(lock, "10", "0", "14") for lock in locks]
    many = "--stock", "100", "--buyers", "10000", "--processes", "2"
    Sale.objects.all().delete()
    sale = subprocess.Popen(
        [sys.executable, "manage.py", "flash_sale", *many],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # The signal reaches all processes of the command, as Ctrl-C does, but none of
        # the tests. The default handler is restored, because the tests may ignore the
        # signal.
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert "Flash sale" in sale.stdout.readline()
        until(Sale.objects.exists, 60)
        os.killpg(sale.pid, signal.SIGINT)
        output = sale.communicate(timeout=60)[0]
    finally:
        if sale.poll() is None:
            os.killpg(sale.pid, signal.SIGKILL)
            sale.wait()
    assert sale.returncode == 130, output
    assert "Interrupted" in output
    assert "Traceback" not in output
    until(lambda: not living(sale.pid))
