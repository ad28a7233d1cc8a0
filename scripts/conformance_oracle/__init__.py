"""A judge of found attention layers: it changes weights and looks at what reaches the attention kernels.

Shares no code with the finder. Of the sites it reads plain entries only: names, numbers and flags.
"""

from scripts.conformance_oracle.judge import Judgement, judge_model
from scripts.conformance_oracle.runs import Bench

__all__ = ["Bench", "Judgement", "judge_model"]
