"""The planted training as a script for one process, which `grappe launch` runs unedited."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.planted import main

main()
