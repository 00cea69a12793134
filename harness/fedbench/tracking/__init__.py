"""MLflow: where runs are stored, what is written of them, and reading it back."""
