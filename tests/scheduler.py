"""Distributes tests over xdist's workers: each module to one, as its tests share what they made."""

from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)  # xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class OneWorkerPerModule(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.partition("::")[0]

    return OneWorkerPerModule(config, log)
