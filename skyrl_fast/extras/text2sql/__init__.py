"""The text-to-SQL environment, with bounded queries."""
