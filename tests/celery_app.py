"""A Celery application whose broker is a directory, for runtime/test_child_exits.py."""

from __future__ import annotations

import os
from pathlib import Path

from celery import Celery


def application(directory: Path, **options: object) -> Celery:
    made = Celery("tests", broker="filesystem://", **options)
    made.conf.update(
        broker_transport_options={
            "data_folder_in": str(directory),
            "data_folder_out": str(directory),
            "control_folder": str(directory / "control"),
        },
        worker_prefetch_multiplier=1,
        broker_connection_retry_on_startup=True,
    )
    return made


app = application(Path(os.environ.get("DLOCKS_TEST_BROKER", "")))


@app.task
def work(name: str) -> None:
    from tests import children

    children.work(name)
