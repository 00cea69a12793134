"""`fedbench.tune`; all else that `fedbench` gives Python is in `fedbench.workflow`."""
