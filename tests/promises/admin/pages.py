"""The pages of the admin as a browser sees them, and the forms that it sends."""

import html
import re

from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from dlocks.models import LockClaim, ResourceLock
from tests import rows
from tests.promises.admin.names import END, LIST


def detail(key: str, page: str = "change") -> str:
    return reverse(f"admin:dlocks_resourcelock_{page}", args=[quote(key)])


def person(name: str, *permissions: str, **fields) -> Client:
    user = User.objects.create_user(name, password="x", is_staff=True, **fields)
    found = Permission.objects.filter(content_type__app_label="dlocks")
    user.user_permissions.set(found.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


def page(response) -> str:
    assert response.status_code == 200
    text = response.content.decode()
    assert rows.OWNER[:8] not in text, "the owner is on the page"
    return text


def text_of(markup: str) -> str:
    """Return the text of a page without its markup."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def table_rows(markup: str) -> list[str]:
    return re.findall(r"<tr>.*?</tr>", markup, re.DOTALL)


def to_form(key: str) -> str:
    """Return a key as the checkboxes of the list have it, without line breaks."""
    return key.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def act(client, action, *keys, query="", **data):
    """Run an action of the list on the keys as a browser would; return the page."""
    form = {"action": action, "_selected_action": list(map(to_form, keys)), **data}
    return page(client.post(LIST + query, form, follow=True))


def fields(text: str) -> dict[str, list[str]]:
    """Return the form of a confirmation page as a browser would send it."""
    sent: dict[str, list[str]] = {}
    hidden = r'<input type="hidden" name="([^"]+)" value="([^"]*)"'
    if 'id="content"' in text:
        text = text[text.index('id="content"') :]
    for name, value in re.findall(hidden, text):
        # A browser sends each line break as CR LF.
        value = re.sub("\r\n|\r|\n", "\r\n", html.unescape(value))
        sent.setdefault(name, []).append(value)
    if 'name="reason"' in text:
        sent["reason"] = ["tests"]
    return sent


def buttons(text: str, name: str = "") -> list[dict[str, str]]:
    """Return the fields that the buttons beside holds send."""
    button = r'<button [^>]*form="dlocks-end" name="(\w+)" value="([^"]*)"'
    found = re.findall(button, text)
    return [{of: html.unescape(value)} for of, value in found if name in of]


def end(client: Client, form: dict, query: str = "") -> str:
    """Send the form of a button or of a confirmation; return the page that follows."""
    return page(client.post(END + query, form, follow=True))


def told(text: str) -> str:
    """Return the messages of a page."""
    message = r'<li class="(?:success|warning|error)">(.*?)</li>'
    return html.unescape(" ".join(re.findall(message, text, re.DOTALL)))


def confirm(client: Client, form: dict) -> str:
    """Send the form of a confirmation page, and return the messages that follow."""
    return told(end(client, form))


def actions(text: str) -> set[str]:
    return set(re.findall(r'<option value="(\w+)">', text))


def counters(key: str) -> tuple[int, int]:
    """Return the numbers of waiters and of shared holds in the row of a key."""
    lock = ResourceLock.objects.get(pk=key)
    return lock.waiters, lock.shares


def tokens() -> list[int]:
    """Return the tokens of all shared holds."""
    shared = LockClaim.objects.exclude(version=None)
    return sorted(shared.values_list("version", flat=True))


def log() -> list[tuple[str, str, str]]:
    entries = LogEntry.objects.order_by("pk")
    return [(one.user.username, one.object_id, one.change_message) for one in entries]
