"""Distributes tests over xdist's workers: each module to one, as its tests share what they made."""

from xdist.scheduler import LoadScopeScheduling


class OneWorkerPerModule(LoadScopeScheduling):
    """Keeps each module on one worker, as its tests share what they made."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0]
