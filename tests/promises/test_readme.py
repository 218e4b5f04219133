"""The READMEs and the page on safety agree with what they refer to."""

import re
from pathlib import Path

import pytest

from benchmarks import report
from tests.scripts import run_python

pytestmark = [pytest.mark.front, pytest.mark.once]

ROOT = Path(__file__).resolve().parent.parent.parent
# A project that uses a lock on one database, and prints the lines of the modules of
# dlocks that this has loaded.
ONE_LOCK = """
import sys
from pathlib import Path
import django
from django.conf import settings
from django.core.management import call_command
database = {"ENGINE": "django.db.backends.sqlite3", "NAME": "one.sqlite3"}
settings.configure(INSTALLED_APPS=["dlocks"], DATABASES={"default": database})
django.setup()
call_command("migrate", verbosity=0)
from dlocks import db_lock
with db_lock("stock:7"):
    pass
loaded = [sys.modules[name] for name in sys.modules if f"{name}.".startswith("dlocks.")]
files = [Path(module.__file__) for module in loaded if module.__file__]
print(sum(len(file.read_text().splitlines()) for file in files))
"""


@pytest.mark.parametrize(("readme", "language"), [("README", 0), ("README.zh-CN", 1)])
def test_each_figure_is_one_of_the_linked_results(readme, language):
    """Each figure is the median in the table "Uncontended", which is of one run."""
    text = (ROOT / f"{readme}.md").read_text()
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    shown = text.partition(report.BEGIN)[2].partition(report.END)[0]
    assert "](benchmarks/RESULTS.md)" in text
    assert shown.strip() == report.speeds(results, language).strip()
    assert shown.count(" µs |") == len(report.SPEEDS)


def test_the_results_are_short_enough_to_be_read():
    """They are those of the last run: 700 words."""
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    assert len([word for word in text.split() if re.search(r"\w", word)]) <= 700


def test_the_page_on_safety_numbers_the_ten_promises():
    """Other pages, issues and tests can refer to a promise by its number."""
    text = (ROOT / "docs" / "safety.md").read_text()
    promised = text.partition("## What is promised\n")[2].partition("\n## ")[0]
    numbers = re.findall(r"^(\d+)\. \*\*.+?\*\*", promised, re.MULTILINE | re.DOTALL)
    assert [int(number) for number in numbers] == list(range(1, 11))


def test_the_lines_behind_a_lock_are_those_that_the_readmes_name(tmp_path):
    """A team lead can weigh the code. The rest is loaded only where it is used."""
    ran = run_python("-c", ONE_LOCK, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    for readme in ("README.md", "README.zh-CN.md"):
        text = (ROOT / readme).read_text()
        (said,) = re.findall(r"([\d,]+) (?:lines\b|行)", text)
        assert abs(int(ran.stdout) - int(said.replace(",", ""))) <= 200, ran.stdout
