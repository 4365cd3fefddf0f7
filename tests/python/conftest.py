"""Makes the helpers of tests/python/support importable: ``import ranks``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
