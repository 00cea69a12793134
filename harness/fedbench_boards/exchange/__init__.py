"""Results of others: folders that say what made them, checks of such folders, runs repeated, stores merged."""
