# SPDX-License-Identifier: Apache-2.0
"""CUDA C++ kernels, compiled at run time for the device at hand (NVRTC, sm_80 and newer)."""
