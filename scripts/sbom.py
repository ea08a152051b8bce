"""Lists what is installed here, as a bill of materials in CycloneDX's JSON, and says which files were changed since.

    python scripts/sbom.py > sbom.json       (or: make sbom)

Standard library only. Exit code 1: a file is not what its package's RECORD says, or is gone.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution
from typing import Any


def main() -> int:
    """Writes the bill to the standard output, and what was changed to the standard error."""
    found = {one.metadata["Name"].lower(): one for one in importlib.metadata.distributions() if one.metadata["Name"]}
    changed = {name: list(differing(one)) for name, one in found.items()}
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "components": [component(name, found[name], changed[name]) for name in sorted(found)],
    }
    json.dump(bill, sys.stdout, indent=1)
    print()
    for name, files in sorted(changed.items()):
        for file in files:
            print(f"changed since it was installed: {name}: {file!r}", file=sys.stderr)
    return 1 if any(changed.values()) else 0


def component(name: str, one: Distribution, changed: list[str]) -> dict[str, Any]:
    """A package: name, version, licence, and the hash of its RECORD, which has those of its files."""
    record = one.read_text("RECORD") or ""
    licence = one.metadata.get("License-Expression") or (one.metadata.get("License") or "").partition("\n")[0][:80]
    return {
        "type": "library",
        "name": name,
        "version": one.version,
        "purl": f"pkg:pypi/{name.replace('_', '-')}@{one.version}",
        "licenses": [{"license": {"name": licence}}] if licence else [],
        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(record.encode()).hexdigest()}],
        "properties": [{"name": "requires", "value": text} for text in one.requires or () if "extra ==" not in text]
        + [{"name": "changed", "value": file} for file in changed],
    }


def differing(one: Distribution) -> Iterator[str]:
    """The files of a package whose content is not what its RECORD says."""
    for file in one.files or ():
        if file.hash is None or file.hash.mode != "sha256":
            continue
        try:
            digest = hashlib.sha256(file.locate().read_bytes()).digest()
        except OSError:
            yield str(file)
            continue
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            yield str(file)


if __name__ == "__main__":
    sys.exit(main())
