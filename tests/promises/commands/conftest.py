"""The terminal of the commands."""

from tests.promises.admin.conftest import audited
from tests.promises.commands.running import answer, without_terminal

__all__ = ["answer", "audited", "without_terminal"]
