"""Places of a micro-batch's tokens: rows, packs, and the parts that ranks hold."""
