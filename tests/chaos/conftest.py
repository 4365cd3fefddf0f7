"""Makes this folder's modules importable: import rows."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
