"""User functions (rewards, rollouts), run in separate processes, so that they cannot stop or block a run."""
