"""Tools beside a run: planning, translating, experiments, evaluation, export, the doctor."""
