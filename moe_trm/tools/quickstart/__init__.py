"""The quickstart: a tiny new model, warmed up by supervised steps, then trained by RL on the real engines."""
