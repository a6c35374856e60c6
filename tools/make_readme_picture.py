#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draw docs/images/quality.png, README's picture, from a quality results file.

python tools/make_readme_picture.py [benchmarks/results/quality_qwen.json]
python tools/make_readme_picture.py --check     exit 1 if the picture was drawn from another state of the file

The picture carries the hash of the rows that it shows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from make_readme_table import ROOT, load

from oscar_kv.evaluation.plots import quality_bars, save


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = ROOT / "benchmarks" / "results" / "quality_qwen.json"
    parser.add_argument("results", type=Path, nargs="?", default=default)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "images" / "quality.png")
    parser.add_argument("--check", action="store_true", help="exit 1 if the picture is out of date; draw nothing")
    options = parser.parse_args(arguments)
    meta, rows = load(options.results)
    shown = [r for r in rows if r.get("kl") is not None and r.get("dataset")]
    context = max(r["context"] for r in shown)
    shown = [r for r in shown if r["context"] == context]
    digest = hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()
    if options.check:
        if options.output.is_file() and digest.encode() in options.output.read_bytes():
            return 0
        print(
            f"{options.output} was not drawn from {options.results}: run tools/make_readme_picture.py", file=sys.stderr
        )
        return 1
    title = f"What the cache costs: {Path(str(meta.get('model'))).name}, {context:,} tokens of context"
    print(save(quality_bars(shown, title), options.output, source=digest))
    return 0


if __name__ == "__main__":
    sys.exit(main())
