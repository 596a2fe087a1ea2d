"""Functions of the user's own (rewards, rollouts), run in processes of their own: nothing they do can stop or block a run."""
