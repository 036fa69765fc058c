"""What users have now: the code of other systems, imported or restated."""
