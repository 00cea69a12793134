"""The suites that ship with fedbench, one YAML file each, and the published numbers they replay; data, no code."""
