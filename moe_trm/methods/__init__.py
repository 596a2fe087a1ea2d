"""Names of the mathematics that a configuration may choose, and functions of the user's own in their place. Imports no torch."""
