"""Any planner over a recorded rollout log, or over simulated prompts: no model, no GPU.

python -m xrpo_fast.replay RUN_DIR --planner uniform,paper --exploration 0.01,0.1,1

This is how lambda is picked before rollouts are paid for.
"""
