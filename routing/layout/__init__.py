"""Where the tokens of a micro-batch lie: rows, packs, and the parts that ranks hold."""
