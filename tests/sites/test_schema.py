"""A site's TOML: every shipped one holds, a user's own wins, and a mistake gets one message that names the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from grappe import sites
from grappe.errors import UsageError

GOOD = """title = "Mine"
source = "https://example.org"
date = 2026-11-20
[node]
gpus = 4
gpu = "A100"
cores = 64
[ask]
gpus = "--gres=gpu:{gpus}"
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = sites.own_folder()
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("name", sorted(sites.files()))
def test_shipped_sites_hold(name: str) -> None:
    site = sites.find(name)
    assert site.source.startswith("http")
    assert all(why for why in site.unconfirmed.values())


def test_a_users_own_site_wins(own: Path) -> None:
    (own / "narval.toml").write_text(GOOD)
    (own / "mine.toml").write_text(GOOD)
    assert sites.find("narval").title == sites.find("mine").title == "Mine"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("cores = 64", "core = 64", "node.core is no key: did you mean cores"),
        ("cores = 64", "", "node.cores is missing"),
        ("cores = 64", 'cores = "64"', "node.cores='64' is not a whole number"),
        ("cores = 64", "cores = 0", "node.cores=0: it must be more than 0"),
        ("cores = 64", "cores = true", "node.cores=True is not a whole number"),
        ("--gres=gpu:{gpus}", "--gres=gpu:4", "lacks {gpus}"),
        ("--gres=gpu:{gpus}", "--gres=gpu:{gpus} $(touch x)", "is no option of sbatch"),
        ("[ask]", '[job]\nmodules = ["a; touch x"]\n[ask]', "is no name of a module"),
        ("[ask]", '[job]\nlocal = "$(pwd)"\n[ask]', "is no folder"),
        ("[ask]", '[job.variables]\n"A=1;x" = "1"\n[ask]', "is no name of a variable"),
        ("[ask]", '[ask]\naccount = "always"', "ask.account='always' is not one of"),
        ("[ask]", "[ask", "Expected"),
        ("date = 2026-11-20", 'date = "today"', "date='today' is not a date"),
    ],
)
def test_a_mistake_is_named(own: Path, old: str, new: str, words: str) -> None:
    (own / "mine.toml").write_text(GOOD.replace(old, new))
    with pytest.raises(UsageError) as refusal:
        sites.find("mine")
    assert words in str(refusal.value)
    assert str(own / "mine.toml") in str(refusal.value)


def test_an_unknown_site_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="no site 'narvall': did you mean narval"):
        sites.find("narvall")


def test_login_nodes_are_known_by_their_variables() -> None:
    assert sites.current({"CC_CLUSTER": "narval"}) == "narval"
    assert sites.current({"NERSC_HOST": "perlmutter"}) == "perlmutter"
    assert sites.current({}) == "generic"
