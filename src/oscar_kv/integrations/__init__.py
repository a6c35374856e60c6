# SPDX-License-Identifier: Apache-2.0
"""Where the cache meets inference engines: one package an engine, imported when it is used."""
