"""``DLOCKS_SHOW_HOLDER``: host, process, thread and IP can be hidden."""

import pickle
import socket
from contextlib import suppress

import pytest
from django.core.checks import run_checks

from dlocks import LockError, LockLost, LockStale, LockTimeout, db_lock
from dlocks.testing import lose
from tests import rows
from tests.for_each import for_each
from tests.promises.admin.names import CLEAR, END, FORCE, LIST
from tests.promises.admin.pages import act, detail, end, fields, log, page
from tests.promises.commands.running import run

pytestmark = [pytest.mark.front, pytest.mark.django_db]

# Values that are unlike anything else on a page.
HOST, ADDRESS = "qx7host", "203.0.113.77"
HOLDER = f"{HOST}:48151:Qx7Thread"
WHO = {"holder": HOLDER, "owner_ip": ADDRESS}

hidden = pytest.mark.usefixtures("hides")


@pytest.fixture
def hides(settings, with_history):
    settings.DLOCKS_SHOW_HOLDER = False


def topology(text) -> list[str]:
    return [part for part in (HOST, "48151", "Qx7Thread", ADDRESS) if part in text]


def every_page(client) -> dict[str, str]:
    """Return all admin pages about locks, and the result of each action."""
    for key in ("held", "held too", "waited for"):
        rows.held(key, **WHO)
    rows.stale("stale", **WHO)
    for key in ("free", "shared", "shared too"):
        rows.free(key, **WHO)
    rows.shares("shared", 1001, **WHO)
    rows.shares("shared too", 1002, **WHO)
    rows.stale_share("shared", 1003, **WHO)
    rows.waits("waited for", **WHO)
    dead = rows.dead("waited for", **WHO)
    rows.ended("held", **WHO)
    places = (LIST, f"{LIST}?part=now", f"{LIST}?part=past", f"{LIST}?state=free")
    pages = {address: page(client.get(address)) for address in places}
    for key in ("held", "stale", "free", "shared", "waited for"):
        pages[key] = page(client.get(detail(key)))
        pages[f"past of {key}"] = page(client.get(detail(key), {"part": "past"}))
    pages["clear"] = act(client, CLEAR, "stale", "held too", "shared")
    asked = pages["confirm"] = act(client, FORCE, "held", "held too", "shared too")
    pages["without a reason"] = page(client.post(END, {**fields(asked), "reason": ""}))
    pages["released"] = end(client, fields(asked))
    pages["taken out"] = end(client, {"clear": f"claim {dead.pk} waited for"})
    for key in ("held", "stale", "waited for", "shared"):
        pages[f"history of {key}"] = page(client.get(detail(key, "history")))
    pages["index"] = page(client.get("/admin/"))
    return pages


@hidden
def test_hidden_holders_are_on_no_page_and_in_no_log(boss, settings):
    """Host, process, thread and IP are on no page and in no message.

    The admin's log does not contain them either. An invalid setting hides them.
    """
    pages = every_page(boss)
    settings.DLOCKS_SHOW_HOLDER = "True"
    pages["invalid"] = page(boss.get(LIST))
    assert {
        name: topology(text) for name, text in pages.items() if topology(text)
    } == {}
    assert topology(str(log())) == []
    assert len(log()) == 6
    assert "a hidden holder" in pages["confirm"]
    assert "a hidden holder" in pages["invalid"]


@pytest.mark.usefixtures("with_history")
def test_holders_are_shown_by_default(boss):
    """This proves that the previous test checks the right places."""
    pages = every_page(boss)
    without = {name for name, text in pages.items() if not topology(text)}
    known = {"past of stale", "past of free", "past of shared", "past of waited for"}
    known |= {"index", "clear", "released", "taken out", "history of shared"}
    assert without <= known
    assert len(topology(str(log()))) == 4


@hidden
def test_hidden_holders_cannot_be_searched_or_sorted(boss):
    """Neither a search nor the order of the rows reveals a hidden holder."""
    rows.held("a", holder="z" + HOLDER, owner_ip=ADDRESS)
    rows.held("b", holder="a" + HOLDER, owner_ip=ADDRESS)
    for words in (HOST, ADDRESS, "Qx7"):
        assert "No lock matches" in page(boss.get(LIST, {"q": words}))
    first, last = (page(boss.get(LIST, {"o": order})) for order in ("3", "-3"))
    for text in (first, last):
        assert text.index(">b</bdi>") < text.index(">a</bdi>")


@pytest.mark.parametrize("shown", [True, False, "hash", None, "True", 1, [], "name"])
def test_the_checks_report_an_invalid_show_holder_setting(settings, shown):
    """They find no problem in the admin."""
    settings.DLOCKS_SHOW_HOLDER = shown
    found = run_checks(databases=[])
    assert not [one for one in found if one.id.startswith("admin.")]
    messages = [one.msg for one in found if one.id == "dlocks.E008"]
    assert len(messages) == (shown is not True and shown is not False)
    assert all(repr(shown) in message for message in messages)


@hidden
def test_commands_and_the_audit_show_hidden_holders(
    audited, django_capture_on_commit_callbacks
):
    """Commands and the audit log are for operators of the site."""
    rows.held("a", **WHO)
    assert len(topology(run("list_locks"))) == 3
    assert len(topology(run("list_locks", "--json"))) == 4
    with django_capture_on_commit_callbacks(execute=True):
        said = run("clear_lock", "a", "--yes", "--reason", "why")
    assert len(topology(said)) == 4
    assert len(topology(audited()[0].getMessage())) == 4


@pytest.mark.django_db(transaction=True)
@for_each("shown", [True, False])
def test_error_messages_hide_holders(settings, in_other_thread, shown):
    """The text of an error has no more than the setting allows.

    Its attributes have all values.
    """
    settings.DLOCKS_SHOW_HOLDER = shown
    with db_lock("a") as mine:
        with pytest.raises(LockTimeout) as busy:
            in_other_thread(db_lock("a", timeout=0).acquire)
        with pytest.raises(LockLost) as lost:
            lose("a")
            mine.check()
        me = busy.value.holder.holder
        rows.stale("left", holder=me)
        with pytest.raises(LockStale) as stale:
            db_lock("left", timeout=0, takeover=False).acquire()
        with suppress(LockError):
            mine.release()
    assert stale.value.holder.holder == me
    assert me.startswith(socket.gethostname())
    assert busy.value.holder.owner_ip
    for error in (busy.value, lost.value, stale.value, busy.value.holder):
        assert (me in str(error)) is (shown is True)
        assert (socket.gethostname() in str(error)) is (shown is True)
        if isinstance(error, Exception):
            assert (me in repr(error)) is (shown is True)
            assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(busy.value.holder.owner_ip) not in str(busy.value) or shown is True
