"""What a person asks for beside a run: planning, translating, experiments, evaluation, export, the doctor."""
