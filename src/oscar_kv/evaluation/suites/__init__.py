# SPDX-License-Identifier: Apache-2.0
"""Tasks that are generated and scored without any engine: what is asked, and whether an answer is right.

A back end renders a :class:`~.base.Sample`, generates, and hands the answer back to the task that made the sample.
"""

from .base import Measure, Message, Sample, Task, history_share
from .gsm8k import Gsm8k
from .humaneval import HumanEval
from .ruler import RULER_TASKS, ruler_task
from .ruler_qa import RulerQa
from .sandbox import Outcome, Sandbox
from .verbatim import Verbatim

__all__ = [
    "Measure", "Message", "Sample", "Task", "history_share",
    "Gsm8k", "HumanEval", "RULER_TASKS", "RulerQa", "Verbatim", "ruler_task",
    "Outcome", "Sandbox",
]  # fmt: skip
