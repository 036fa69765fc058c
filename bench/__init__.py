"""Every op beside the code people use otherwise."""
