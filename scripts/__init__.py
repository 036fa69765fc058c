"""Scripts of the Makefile, and reports on the project."""
