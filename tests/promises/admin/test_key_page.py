"""The page of a key in the admin, with its history."""

import html
import re
from copy import copy
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection

from dlocks.models import LockClaim
from tests import rows
from tests.promises.admin.names import LIST, ODD_KEYS
from tests.promises.admin.pages import buttons, detail, page, table_rows, text_of

pytestmark = [pytest.mark.front, pytest.mark.django_db]


@pytest.mark.driver
def test_the_page_of_a_key_shows_its_holds_and_its_queue(viewer):
    """Shared holds and waiters have host, IP, start and mode, but never an owner.

    The page stays short with any number of waiters.
    """
    rows.free("catalogue", holder="writer:1:t")
    rows.shares("catalogue", 1001, holder="web-1:<b>:t", permits=3)
    rows.stale_share("catalogue", 1003, holder="web-2:1:t")
    rows.waits("catalogue", holder="web-3:1:t")
    rows.dead("catalogue", holder="web-4:1:t", shared=True)
    text = page(viewer.get(detail("catalogue")))
    holds, queue = text.split('id="dlocks-queue"')
    assert "writer:1:t" not in text
    for shown in (
        "web-1:&lt;b&gt;:t", "198.51.100.8", "shared by up to 3", "1001",
        "dlocks-stale", "expired",
    ):  # fmt: skip
        assert shown in holds
    for shown in (
        "web-3:1:t", "waiting", "exclusive", "web-4:1:t", "no heartbeat for",
        'title="2020-01-01 22:04:05"',
        'data-label="Position" class="dlocks-number">1</td>',
    ):  # fmt: skip
        assert shown in queue
    assert buttons(text) == []
    rows.held("busy", hold_count=3, version=1234567)
    text = page(viewer.get(detail("busy")))
    assert ">1234567<" in text
    assert "web-1:4711:MainThread ×3" in text
    claim, more = rows.waits("busy"), []
    for number in range(101):
        claim.id, claim.owner = None, f"{number:032}"
        more.append(copy(claim))
    LockClaim.objects.bulk_create(more)
    text = page(viewer.get(detail("busy")))
    assert "And 2 more." in text
    assert text.count("worker-1:815:MainThread") == 100


def test_a_key_is_free_if_it_has_no_row(viewer, historian, with_history):
    """Its page has its last holder, or only its past. So every key has a page."""
    rows.free("old")
    rows.ended("gone")
    # Only PostgreSQL shows every transaction that holds a key.
    free = "This key is free, or in a transaction."
    if connection.vendor == "postgresql":
        free = "This key is free and has no waiters."
    text = text_of(page(viewer.get(detail("old"))))
    assert f"{free} last holder: web-1:4711:" in text
    assert "succeeded" in text
    text = text_of(page(historian.get(detail("gone"))))
    assert free in text
    assert "Timeline of this key" in text
    assert "last holder" not in text
    assert "This key is free" in page(viewer.get(detail("nope")))
    rows.waits("old")
    text = text_of(page(viewer.get(detail("old"), {"part": "now"})))
    free = free.replace(" and has no waiters", "")
    assert f"{free} last holder" in text
    assert "worker-1:815:MainThread" in text


@pytest.mark.storage
def test_the_statements_of_a_key_can_be_copied(viewer):
    """They show the holder and the queue to a database client, and no owner."""
    for key in ('it\'s 100% \\ "odd"', *ODD_KEYS):
        rows.held(key, holder="web-9:1:t")
        rows.waits(key, holder="web-8:1:t")
        text = page(viewer.get(detail(key)))
        sql = html.unescape(
            "".join(re.findall(r"<pre>(SELECT.*?)</pre>", text, re.DOTALL))
        )
        found = []
        for statement in sql.splitlines():
            with connection.cursor() as cursor:
                cursor.execute(statement)
                found += cursor.fetchall()
        is_printable = key.isprintable()
        assert [row[2] for row in found] == ["web-9:1:t", "web-8:1:t"] * is_printable
        assert "owner," not in sql


@pytest.mark.storage
@pytest.mark.usefixtures("with_history")
def test_the_chart_shows_the_contention_of_the_last_hour(historian):
    """The chart counts holds and waits per minute, for the last hour only.

    The longest holds of this hour come first, with links to their keys.
    """
    for number in range(7):
        rows.ended(f"key-{number}", ago=90, held=number + 1)
    rows.ended("key-7", ago=90, held=8, waited=2.5)
    rows.ended("b", ago=3500)
    rows.ended("b", ago=3700, held=100, waited=9)
    text = page(historian.get(LIST))
    assert text.index("dlocks-chart") < text.index("dlocks-states")
    said = "Locks released: 9. Acquired after a wait: 1 (11 %). Longest wait: 2.5 s."
    assert said in text_of(text)
    titles = re.findall(r"<g><title>(.*?)</title>", text)
    assert titles == ["1 min ago: 8 (1 had waited)", "58 min ago: 1 (0 had waited)"]
    assert "released per minute (highest: 8)" in text
    link = r'<li>\s*<a href="([^"]*)"><bdi class="dlocks-key">([^<]*)'
    shown = re.findall(link, text)
    assert [key for _, key in shown] == [f"key-{number}" for number in range(7, 1, -1)]
    about = text_of(page(historian.get(shown[1][0])))
    assert "Locks released: 1, all acquired without a wait." in about


def bars_of(markup):
    """Return the ending, the place and the width of each hold in a timeline."""
    bar = r'<rect class="dlocks-end-(\w+)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"'
    return re.findall(bar, markup)


@pytest.mark.driver
@pytest.mark.usefixtures("with_history")
def test_the_timeline_shows_every_hold_of_a_key(historian):
    """Simultaneous holds are drawn in lanes. A current hold extends to the end."""
    rows.ended("a", ago=90, held=10, token=1)
    rows.ended("a", ago=50, held=30, token=2, shared=True, ending="F")
    rows.ended("a", ago=40, held=30, token=3, shared=True, ending="L")
    rows.ended("b", ago=5, held=1)
    rows.held("a", begin_time=datetime.now(UTC) - timedelta(seconds=20))
    text = page(historian.get(detail("a")))
    bars = bars_of(text.split("dlocks-timeline")[1])
    assert [ending for ending, *_ in bars] == ["R", "F", "L", "now"]
    # The current one is half as high as the others.
    assert [float(y) for _, _, y, _ in bars] == [2, 2, 16, 4.5]
    starts = [float(x) for _, x, _, _ in bars]
    assert starts == sorted(starts)
    assert starts[0] == 0
    assert float(bars[-1][1]) + float(bars[-1][3]) == pytest.approx(1000, abs=1)
    # The hold began 80 seconds ago and ended 50 seconds ago, on a scale of 100 seconds.
    assert starts[1] == pytest.approx(200, abs=20)
    assert text_of(text).count("held now") == 1
    past = text[text.index("Ended holds of this key") :]
    cells = map(text_of, table_rows(past))
    shown = [" ".join(cell.split()[-2:]) for cell in cells if "web-1" in cell]
    assert shown == ["lost 3", "failed 2", "released 1"]


@pytest.mark.usefixtures("with_history")
def test_exclusive_holds_are_drawn_in_one_lane(historian):
    """They do not overlap, although the clocks of their processes may differ."""
    for number in range(9):
        rows.ended("a", ago=95 - 10 * number, held=12.5, token=number + 1)
    rows.held("a", begin_time=datetime.now(UTC) - timedelta(seconds=16))
    text = page(historian.get(detail("a")))
    bars = [tuple(map(float, place)) for _, *place in bars_of(text)]
    assert len(bars) == 10
    assert [y for _, y, _ in bars] == [2] * 9 + [4.5]
    for (x, _, width), (following, _, _) in zip(bars, bars[1:], strict=False):
        assert x + width <= following + 3.1
