"""Makes ``twin`` and ``program`` importable for the tests of examples/cpp."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
