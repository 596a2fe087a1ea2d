"""The interfaces that clients speak, one file each. What is behind them is the same, and knows none of them."""
