"""The quickstart: a tiny model made on the spot, warmed up by supervised steps, then trained by RL on the real engines."""
