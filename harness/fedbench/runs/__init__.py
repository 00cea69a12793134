"""A run from its spec to its result: prepared, checkpointed, carried out by an engine."""
