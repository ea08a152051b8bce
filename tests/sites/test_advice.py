"""Advice about a site: a folder is judged by its innermost storage, a precision by its GPU."""

from pathlib import Path

import pytest

from grappe import sites
from grappe.sites.advice import described, misplaced, storage_of, unfit_precision

PLACES = {"HOME": "/home/me", "WORK": "/work/p", "SCRATCH": "/scratch/me", "DSDIR": "/data/sets", "STORE": "/store/p"}


def test_the_innermost_storage_holds_a_folder() -> None:
    narval = sites.find("narval")
    for folder, place in (("/home/me/x", "$HOME"), ("/home/me/projects/p/x", "$HOME/projects"), ("/tmp/x", None)):
        found = storage_of(narval, Path(folder), PLACES)
        assert (found.place if found else None) == place


def test_a_place_behind_a_link_is_found_by_both_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "real" / "me").mkdir(parents=True)
    (tmp_path / "home").symlink_to(tmp_path / "real")
    for folder in (tmp_path / "home" / "me" / "runs", tmp_path / "real" / "me" / "runs"):
        found = storage_of(sites.find("narval"), folder, {**PLACES, "HOME": str(tmp_path / "home" / "me")})
        assert found is not None and found.place == "$HOME"


def test_what_lies_in_the_wrong_place_is_told_the_right_one() -> None:
    narval = sites.find("narval")
    said = misplaced(narval, "runs", Path("/home/me/runs"), PLACES)
    assert said is not None
    assert "in $HOME (50 GB" in said
    assert "should lie in $SCRATCH (20 TB" in said
    assert misplaced(narval, "runs", Path("/scratch/me/runs"), PLACES) is None
    assert misplaced(narval, "runs", Path("/elsewhere/runs"), PLACES) is None  # unknown: nothing to say
    assert misplaced(narval, "runs", Path("/scratch/me/runs"), {}) is None


def test_jean_zay() -> None:
    site = sites.find("jean-zay-a100")
    said = misplaced(site, "runs", Path("/store/p/runs"), PLACES)
    assert said is not None
    assert "$WORK or $SCRATCH" in said
    assert misplaced(site, "data", Path("/data/sets/imagenet"), PLACES) is None
    texts = {one.place: described(one) for one in site.storage}
    assert texts["$SCRATCH"] == "files are removed after 30 days"
    assert texts["$DSDIR"] == "jobs cannot write there"
    assert site.sources["storage"].startswith("http://www.idris.fr/")


@pytest.mark.parametrize(
    ("precision", "capability", "remedy"),
    [
        ("bf16", (7, 0), "use precision=fp16, with loss scaling"),
        ("bf16", (6, 0), "use fp32"),
        ("tf32", (7, 5), "use precision=fp16"),
        ("fp16", (6, 0), "use fp32"),
        ("fp16", (7, 0), None),
        ("bf16", (8, 0), None),
        ("fp32", (6, 0), None),
        ("bf16", None, None),
    ],
)
def test_precision(precision: str, capability: tuple[int, int] | None, remedy: str | None) -> None:
    found = unfit_precision(precision, "GPU", capability)
    assert (found.do if found else None) == remedy


def test_every_site_with_gpus_of_nvidia_says_their_generation() -> None:
    for name in sites.files():
        site = sites.find(name)
        if site.node is not None and site.node.gpus:
            assert (site.node.capability is None) == (site.node.vendor == "amd"), name
