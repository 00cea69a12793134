"""The small dual encoder that comes with fedbench: its weights, and how they were made."""
