"""Jobs of RQ: the recipe of docs/how-to/workers.md with a real worker.

The worker runs on a real Redis.
"""

from __future__ import annotations

import pytest
from django.apps import apps
from redis import Redis
from rq import Queue

from dlocks import db_lock
from tests import pages
from tests.scripts import run_python

pytestmark = pytest.mark.django_db(transaction=True)


def test_an_rq_job_releases_and_records_its_holds(redis_server, tmp_path):
    """Its process ends by os._exit(). ``dlocks.shutdown()`` is called before that."""
    (recipe,) = pages.blocks("how-to/workers")
    (tmp_path / "recipe.py").write_text(recipe)
    url = redis_server.url.removesuffix("0") + "7"
    with Redis.from_url(url) as connection:
        Queue("default", connection=connection).enqueue("tests.children.work")
        done = run_python(
            *("-m", "rq.cli", "worker", "--burst", "--worker-class", "recipe.Worker"),
            cwd=tmp_path,
            warnings="default",
            # Command lines are public, and this has a password.
            RQ_REDIS_URL=url,
            DJANGO_SETTINGS_MODULE="tests.settings",
        )
        assert done.returncode == 0, done.stderr
    records = apps.get_model("dlocks", "HoldRecord").objects
    assert dict(records.values_list("key_resource", "ending")) == {
        **{f"ended:{number}": "R" for number in range(6)},
        "left": "F",
    }
    with db_lock("left", timeout=0):
        pass
