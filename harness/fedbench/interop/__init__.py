"""Exchange with other systems; each module needs what it exchanges with to be installed."""
