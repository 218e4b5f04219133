"""The READMEs and the page on safety agree with what they refer to."""

import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.front, pytest.mark.once]

ROOT = Path(__file__).resolve().parent.parent.parent
# The contenders in the table of the README, and their names in the results. The README
# in Chinese has them in the same order.
CONTENDERS = {
    "django-pglock": "django-pglock",
    "redis-py, in memory": "redis-py",
    "django-pgware": "django-pgware",
    "dlocks, SQLite": "dlocks, SQLite, pessimistic",
    "dlocks, PostgreSQL": "dlocks, PostgreSQL, pessimistic",
    "redis-py, as durable as a database": "redis-py, appendfsync always",
    "dlocks, MariaDB": "dlocks, MariaDB, pessimistic",
    "Django, PostgreSQL, `select_for_update()`": (
        "Django on PostgreSQL: atomic(), select_for_update().get(), save()"
    ),
    "dlocks, MySQL": "dlocks, MySQL, pessimistic",
    "dlocks, PostgreSQL, in a transaction": "dlocks, PostgreSQL, in a transaction",
    "kazoo (ZooKeeper)": "kazoo",
    "django-db-mutex, PostgreSQL": "django-db-mutex, PostgreSQL",
}


def speeds(readme):
    """Return the rows of the table of speeds, as names and microseconds."""
    text = (ROOT / readme).read_text()
    assert "](benchmarks/RESULTS.md)" in text
    return re.findall(r"^\| (.+) \| ([\d,]+) µs \|$", text, re.MULTILINE)


def test_each_figure_is_one_of_the_linked_results():
    """Each figure is the median in the table "Uncontended", which is of one run.

    The figures grow from row to row.
    """
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    (table,) = re.findall(
        r"^## Uncontended\n(.*?)^## ", results, re.MULTILINE | re.DOTALL
    )
    medians = dict(re.findall(r"^\| ([^|]+?) \| ([\d,]+) \(", table, re.MULTILINE))
    english, chinese = map(speeds, ("README.md", "README.zh-CN.md"))
    assert [name for name, _ in english] == list(CONTENDERS)
    for name, median in english:
        assert median == medians[CONTENDERS[name]], name
    figures = [median for _, median in english]
    assert figures == [median for _, median in chinese]
    numbers = [int(median.replace(",", "")) for median in figures]
    assert numbers == sorted(numbers)
    for (name, _), (translated, _) in zip(english, chinese, strict=True):
        assert re.match(r"[\w.-]+", name)[0] == re.match(r"[\w.-]+", translated)[0]


def test_the_page_on_safety_numbers_the_ten_promises():
    """Other pages, issues and tests can refer to a promise by its number."""
    text = (ROOT / "docs" / "safety.md").read_text()
    promised = text.partition("## What is promised\n")[2].partition("\n## ")[0]
    numbers = re.findall(r"^(\d+)\. \*\*.+?\*\*", promised, re.MULTILINE | re.DOTALL)
    assert [int(number) for number in numbers] == list(range(1, 11))
