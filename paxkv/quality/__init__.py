"""What a way to store K and V costs in quality: scores, greedy tokens and facts found again."""
