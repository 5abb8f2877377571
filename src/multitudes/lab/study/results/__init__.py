"""Results: the leaderboard of a study, comparisons with confidence, and recommendations."""
