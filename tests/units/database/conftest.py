from __future__ import annotations

from tests.promises.database.conftest import no_claim_left

__all__ = ["no_claim_left"]
