# SPDX-License-Identifier: Apache-2.0
"""The tiny models are shared with the tests of the integrations."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "integrations"))
