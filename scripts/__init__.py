"""What the Makefile runs, and what reports on the project."""
