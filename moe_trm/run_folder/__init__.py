"""The files of a run's folder: their names, their formats, and how they are read."""
