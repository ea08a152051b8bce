"""The scripts that every site's golden files hold; `python -m tests.sites.golden` writes them anew."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from grappe.plan import Plan
from grappe.sites.layout import Layout, ResourceRequest, layout
from grappe.sites.schema import Site
from grappe.sites.script import Script, render
from tests.slurm.shapes import live

FOLDER = Path(__file__).with_name("golden")
RUN = Path("/scratch/me/runs/digits-1")
SIZES = ("1-gpu", "1-node", "2-nodes")


def gpus(site: Site, size: str) -> int:
    """Returns the GPUs of a size on a site; of the smallest job, if one GPU is not available."""
    assert site.node is not None
    whole = site.node.gpus
    least = whole if site.ask.whole_nodes and 1 not in site.ask.part_nodes else 1
    return {"1-gpu": least, "1-node": whole, "2-nodes": 2 * whole}[size]


def account(site: Site) -> str | None:
    """One of the form that the site wants."""
    return site.ask.accounts[0].replace("*", "abc") if site.ask.accounts else "abc"


def script(site: Site, size: str, **changes: int) -> Script:
    """The script of a site and a size; `changes` are made to its layout behind the checks."""
    number = gpus(site, size)
    plan = Plan(replicate=number)
    made = layout(plan, site, ResourceRequest(seconds=1800, account=account(site)))
    return Script(
        site=site,
        layout=dataclasses.replace(made, **changes) if changes else made,
        plan=plan,
        name="digits-1",
        arguments=("train", "digits", "epochs=3", *(("--plan", str(plan)) if number > 1 else ())),
        task=("digits", "epochs=3"),
        run=RUN,
        folder=Path("/scratch/me"),
        data="data",
        python="/home/me/.venv/bin/python",
        account=account(site),
        chain=0 if site.job.requeue else 3,
        command=f"grappe submit --site {site.name} -- train digits epochs=3",
    )


def layout_of(site: Site, size: str) -> Layout:
    """Returns the resources that a script requests."""
    return script(site, size).layout


def main() -> None:
    """Writes all golden files."""
    FOLDER.mkdir(exist_ok=True)
    for site in live():
        for size in SIZES:
            (FOLDER / f"{site.name}-{size}.sh").write_text(render(script(site, size)))


if __name__ == "__main__":
    main()
