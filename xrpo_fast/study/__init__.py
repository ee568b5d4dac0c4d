"""Algorithms against each other on one task: python -m xrpo_fast.study STUDY.toml

Every arm (an algorithm, or a variant of one) trains with every seed, all at equal rollouts per
step, each run in its own process. What is finished is compared, paired by seed.
"""
