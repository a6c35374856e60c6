# SPDX-License-Identifier: Apache-2.0
"""``oscar-kv bench``: our kernels and whole decode steps beside the fastest BF16 kernels at hand, in one run.

Every time is the median over replays of a CUDA graph that calls the operation on several input sets in turn; every
contender's answer is checked against a float64 reference before its time counts.
"""
