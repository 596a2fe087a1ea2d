"""RL for Mixture-of-Experts models: record what the rollout did, replay it in the learner, split and correct the mismatch."""

__version__ = "0.1.0"
