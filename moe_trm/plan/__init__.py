"""What a run needs and how long it takes, from config.json and the configuration alone. Imports no torch."""
