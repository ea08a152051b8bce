"""A folder on a site: the innermost storage says what should lie there."""

from __future__ import annotations

from pathlib import Path

from grappe import sites
from grappe.sites.storage import described, misplaced, storage_of

PLACES = {
    "HOME": "/home/me",
    "WORK": "/work/p",
    "SCRATCH": "/scratch/me",
    "DSDIR": "/data/sets",
    "STORE": "/store/p",
}


def test_the_innermost_storage_holds_a_folder() -> None:
    narval = sites.find("narval")
    for folder, place in (
        ("/home/me/x", "$HOME"),
        ("/home/me/projects/p/x", "$HOME/projects"),
        ("/tmp/x", None),
    ):
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
