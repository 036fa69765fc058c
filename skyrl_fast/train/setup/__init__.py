"""What a run checks and reads before its models are loaded."""
