"""The suites that ship with fedbench, one YAML file each; data, no code."""
