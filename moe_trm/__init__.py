"""RL for Mixture-of-Experts models.

The rollout is recorded and replayed in the learner, and the remaining mismatch is measured by part and corrected.
"""

__version__ = "0.2.0"
