# SPDX-License-Identifier: Apache-2.0
"""The packed KV cache in Transformers: ``enable(model, artifact)``, or ``OscarCache`` with attention ``oscar``."""

from . import compat as _compat

_compat.check_version()

from .attention import register as _register  # noqa: E402
from .cache import OscarCache as OscarCache  # noqa: E402
from .enable import disable as disable  # noqa: E402
from .enable import enable as enable  # noqa: E402

_register()
