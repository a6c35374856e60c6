# SPDX-License-Identifier: Apache-2.0
"""``python -m oscar_kv`` is ``oscar-kv``."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
