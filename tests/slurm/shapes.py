"""Every site's nodes for the test cluster, from the site's own file."""

import dataclasses

from grappe import sites
from grappe.sites.schema import Site
from tests.slurm.configuration import Shape

NODES = 2


def live() -> list[Site]:
    """The sites that one can submit to, but for the generic one, which is the cluster itself."""
    known = [sites.find(file.stem) for file in sorted(sites.SHIPPED.glob("[!_]*.toml"))]
    return [site for site in known if site.node is not None and not site.retired]


def hours(site: Site) -> float:
    """The longest time that any of its queues gives."""
    return site.ask.max_hours or max(one.max_hours or 0 for one in site.queue)


def shapes() -> list[Shape]:
    """One partition of two nodes a site, and another of nodes whose GPUs are sliced."""
    whole = [_shape(site) for site in live()]
    return whole + [_sliced(shape, site) for shape, site in zip(whole, live(), strict=True) if site.slice]


def slices(site: Site) -> str:
    """Name of the partition of a site's sliced nodes."""
    return f"{site.name}-slices"


def _sliced(shape: Shape, site: Site) -> Shape:
    gres = ",".join(f"gpu:{part.name}:2" for part in site.slice)
    return dataclasses.replace(shape, name=slices(site), gres=gres)


def _shape(site: Site) -> Shape:
    node = site.node
    assert node is not None
    _, _, selection = site.ask.gpus.partition("=")
    model = [part for part in selection.split(":") if part not in ("", "gpu", "{gpus}")]
    features = [one.partition("=")[2] for one in site.ask.options if one.startswith("--constraint=")]
    return Shape(
        name=site.name,
        nodes=NODES,
        cpus=node.cores,
        megabytes=(node.memory_gb or 400) * 1024,
        gres=":".join(["gpu", *model, str(node.gpus)]) if node.gpus else "",
        minutes=int(hours(site) * 60),
        features=",".join(features),
    )
