"""Methods: their hooks, the hooks' tasks and answers, hyper-parameters."""
