"""Names of the mathematics that a configuration may choose, and functions of the user's own. Imports no torch."""
