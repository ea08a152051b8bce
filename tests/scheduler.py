"""Distributes tests over xdist's workers: each module to one, as its tests share what they made."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

from tests.tiers import unit


class OneWorkerPerModule(LoadScopeScheduling):
    """Keeps each module on one worker, as its tests share what they made, and all that use the cluster on one."""

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)
