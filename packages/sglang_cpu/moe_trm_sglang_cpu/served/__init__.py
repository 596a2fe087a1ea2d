"""The code of the model that this server serves, for SGLang's registry of external models."""
