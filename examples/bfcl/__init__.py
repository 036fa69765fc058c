"""A pretrained model learns to call tools on the Berkeley Function-Calling Leaderboard's tasks."""
