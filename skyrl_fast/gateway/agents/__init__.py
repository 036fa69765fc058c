"""What runs at the gateway: a Python function, or a command."""
