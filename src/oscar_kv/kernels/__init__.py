# SPDX-License-Identifier: Apache-2.0
"""Kernels behind one interface (base.py); registry.py picks the implementation for a device."""
