# SPDX-License-Identifier: Apache-2.0
"""What the demonstration runs on: a small real model fetched on demand, and texts that the package ships."""
