"""Writing runs to MLflow: the listener, the run of the command, a short run at once, and patience with the store."""
