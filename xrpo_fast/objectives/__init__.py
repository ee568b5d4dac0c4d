"""Losses, one file each: `loss(inputs, scale) -> LossOutput` and `aggregate`, the same mean for KL.

A new loss is a new file here with these two names, and its line in the table.
"""

from types import ModuleType

from xrpo_fast.objectives import dapo, dr_grpo, grpo, gspo, gspo_token

OBJECTIVES: dict[str, ModuleType] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "dapo": dapo,
}
