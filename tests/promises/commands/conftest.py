"""The terminal of the commands."""

from tests.promises.admin.conftest import audited
from tests.promises.commands.running import answer, nobody_there

__all__ = ["answer", "audited", "nobody_there"]
