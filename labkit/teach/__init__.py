"""What a lesson is made of: a reference case, predictions that are kept, bounds, tables, and checked exercises.

`lesson = begin("00")` connects to the lab server (or starts it) and says where everything was measured. Nothing in
here imports torch: a lesson's kernel talks to the server, and the ranks do the work.
"""

from labkit.teach.checks import Check, Problem, show_check
from labkit.teach.lesson import Lesson, begin, refusal
from labkit.teach.sidebyside import Row, in_order

__all__ = ["Check", "Lesson", "Problem", "Row", "begin", "in_order", "refusal", "show_check"]
