"""Writers of a leaderboard: terminal, Markdown, CSV, LaTeX."""
