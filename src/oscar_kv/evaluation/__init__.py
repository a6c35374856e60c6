# SPDX-License-Identifier: Apache-2.0
"""What quantisation costs: exact emulation, perplexity and KL, needle retrieval, figures and reports."""
